"""Keeps the state of a run and writes it for other programs, where ``exp_manager.monitoring`` asks for it; its metrics
in Prometheus' text format, version 0.0.4.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, final, get_args
from urllib.parse import parse_qs

from nxdt_core import __version__
from nxdt_core.callback import Callback, Run
from nxdt_core.config import ResolvedConfig
from nxdt_core.errors import NxdtError
from nxdt_core.errors.checkpoints import StorageError, StoreInUse
from nxdt_core.errors.training import MonitoringFileUnwritable, MonitoringPortUnusable
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.run.callbacks.metrics import MetricsWriter
from nxdt_core.run.log import strict_json
from nxdt_core.run.metric_rows import json_object
from nxdt_core.run.start import directory_lock
from nxdt_core.system.http_server import Handler, Server
from nxdt_core.system.regular_files import read_text, replace_text

_log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


Sample = tuple[str, float, Mapping[str, str]]
"""Metric, which is a key of the table below, a value of it, and the value's labels."""
_METRICS = {
    "nxdt_run_info": ("gauge", "1; the labels say which nxdt, plugins and model the run uses"),
    "nxdt_state": ("gauge", "1 for the state of the run, 0 for the others"),
    "nxdt_started_timestamp_seconds": ("gauge", "When this process began, in seconds since 1970"),
    "nxdt_updated_timestamp_seconds": ("gauge", "When these metrics were written, in seconds since 1970"),
    "nxdt_step": ("gauge", "Steps that are done, those before a resume included"),
    "nxdt_max_steps": ("gauge", "Step at which the run ends"),
    "nxdt_consumed_samples_total": ("counter", "Samples of training data that the run has read"),
    "nxdt_consumed_tokens_total": ("counter", "Tokens of training data that the run has read"),
    "nxdt_skipped_steps_total": ("counter", "Steps of this process that were not finite and changed no weight"),
    "nxdt_loss": ("gauge", "Training loss of the last logged step"),
    "nxdt_grad_norm": ("gauge", "Norm of the gradients before clipping"),
    "nxdt_learning_rate": ("gauge", "Learning rate"),
    "nxdt_tokens_per_second": ("gauge", "Throughput since the logged step before"),
    "nxdt_mfu_ratio": ("gauge", "Share of the devices' peak, counted without recomputation"),
    "nxdt_mfu_palm_ratio": ("gauge", "The same, counted as the PaLM paper does"),
    "nxdt_step_time_seconds": ("gauge", "Time of a step"),
    "nxdt_data_wait_seconds": ("gauge", "Part of it in which the step waited for data"),
    "nxdt_max_memory_bytes": ("gauge", "Peak of the memory of rank 0's device"),
    "nxdt_train_metric": ("gauge", "Other columns of metrics.jsonl, by name"),
    "nxdt_validation_metric": ("gauge", "Metrics of the last validation, by name and data set"),
    "nxdt_checkpoint_step": ("gauge", "Step of the newest committed checkpoint"),
    "nxdt_checkpoint_timestamp_seconds": ("gauge", "When the run was as that checkpoint has it"),
    "nxdt_checkpoint_stall_seconds": ("gauge", "Time for which its save stopped training"),
    "nxdt_checkpoint_save_seconds": ("gauge", "Time until it was committed"),
    "nxdt_checkpoint_size_bytes": ("gauge", "Its size"),
}
"""Name of each metric → type and help."""
_COLUMNS = {
    "step": "nxdt_step",
    "consumed_samples": "nxdt_consumed_samples_total",
    "consumed_tokens": "nxdt_consumed_tokens_total",
    "skipped_steps": "nxdt_skipped_steps_total",
    "loss": "nxdt_loss",
    "grad_norm": "nxdt_grad_norm",
    "lr": "nxdt_learning_rate",
    "tokens_per_s": "nxdt_tokens_per_second",
    "mfu": "nxdt_mfu_ratio",
    "mfu_palm": "nxdt_mfu_palm_ratio",
    "step_time_s": "nxdt_step_time_seconds",
    "data_wait_s": "nxdt_data_wait_seconds",
    "max_memory_bytes": "nxdt_max_memory_bytes",
    "checkpoint_blocked_s": "nxdt_checkpoint_stall_seconds",
    "checkpoint_seconds": "nxdt_checkpoint_save_seconds",
    "checkpoint_bytes": "nxdt_checkpoint_size_bytes",
}
"""Column of ``metrics.jsonl`` → metric."""
_COUNTS = ("step", "consumed_tokens")
_LEFT_OUT = frozenset({"checkpoint_age_s", "checkpoint_gb_per_s", "checkpoint_slowdown"})
"""Columns that follow from others, or that are ``null`` at most steps."""
_VALIDATION = "val_"
_LIVING = ("starting", "running")
_DATE = "%Y-%m-%dT%H:%M:%SZ"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
State = Literal["starting", "running", "finished", "stopped", "interrupted", "failed"]
STATES: tuple[State, ...] = get_args(State)


def exposition(samples: Iterable[Sample], labels: Mapping[str, str]) -> str:
    """Return the text of ``samples``, each with ``labels`` as well, by metric in the order of the table."""
    lines = dict[str, list[str]]()
    for name, value, more in samples:
        pairs = (f'{label}="{text.translate(_ESCAPES)}"' for label, text in {**labels, **more}.items())
        number = {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN" if math.isnan(value) else repr(value))
        lines.setdefault(name, []).append(f"{name}{{{','.join(pairs)}}} {number}\n")
    return "".join(
        f"# HELP {name} {text}.\n# TYPE {name} {kind}\n{''.join(lines[name])}"
        for name, (kind, text) in _METRICS.items()
        if name in lines
    )


def _handler(texts: Callable[[], tuple[str, str, float]]) -> type[Handler]:
    """Return what answers ``/metrics`` and ``/health``.

    Args:
        texts: returns the metrics, the health document, and when they were written (seconds since 1970).
    """

    class MonitorHandler(Handler):
        def respond(self) -> None:
            """Answer a scrape or a probe; with 503 for a run that failed, or whose state is older than it accepts."""
            path, _, query = self.path.partition("?")
            metrics, health, written = texts()
            if path == "/metrics":
                self.answer(200, CONTENT_TYPE, metrics)
            elif path == "/health":
                try:
                    oldest = min(map(float, parse_qs(query).get("max_age", [])), default=None)
                except ValueError:
                    self.answer(400, "text/plain", "max_age is a number of seconds.\n")
                    return
                stale = oldest is not None and time.time() - written > oldest
                failed = json.loads(health)["state"] == "failed"
                self.answer(503 if stale or failed else 200, "application/json", health)
            else:
                self.answer(404, "text/plain", "There are /metrics and /health.\n")

    return MonitorHandler


class Monitor:
    """The state of a run, and what of it is written where.

    A file that cannot be written once the run is under way is a warning, and gets no more.

    Args:
        config: the resolved configuration of the run.
        world_size: processes of the run.
        writes: whether this process writes; False on all ranks but the first.
    """

    def __init__(self, config: ResolvedConfig, *, world_size: int, writes: bool) -> None:
        settings = config.run.exp_manager.monitoring
        self._settings, self._config, self._world_size = settings, config, world_size
        self._files: dict[str, Path] = {}
        for key in ("health_file", "metrics_file"):
            name = getattr(settings, key)
            if writes and name is not None:
                self._files[key] = config.run_dir / Path(name).expanduser()
        self._serves = writes and settings.port is not None
        self._server: Server | None = None
        self._state: State = "starting"
        self._error: str | None = None
        self._row: dict[str, float | None] = {}
        self._checkpoint: tuple[int, float] | None = None
        self.max_steps = config.run.trainer.max_steps
        """The last step of the run, which may become known later."""
        self.url: str | None = None
        """Address at which the metrics are served."""
        self._facts = {
            "version": __version__,
            "plugins": config.kernel.fingerprint() if self.enabled else "",
            "model": config.selected("model").component.qualified_name,
        }
        self._started = time.time()
        self._written_at = -math.inf
        self._texts = ("", "{}", self._started)

    @property
    def enabled(self) -> bool:
        """True if this process writes or serves anything."""
        return bool(self._files) or self._serves

    def begin(self) -> None:
        """Write the first state, and open the port.

        Raises:
            MonitoringFileUnwritable: a file cannot be written.
            MonitoringPortUnusable: the port cannot be opened.
        """
        self.update(at_once=True, first=True)
        if self._serves:
            host, port = self._settings.host, self._settings.port or 0
            try:
                self._server = Server(host, port, _handler(lambda: self._texts))
            except (OSError, UnicodeError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise MonitoringPortUnusable(port=port, host=host, reason=reason) from error
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}"
            threading.Thread(target=self._server.serve_forever, name="nxdt-monitoring", daemon=True).start()

    def enter(self, state: State, error: BaseException | None = None) -> None:
        """Set the state of the run and write it at once."""
        self._state = state
        if error is not None:
            self._error = error.code if isinstance(error, NxdtError) else type(error).__name__
        self.update(at_once=True)

    def row(self, values: Mapping[str, Any]) -> None:
        """Keep newer values of metrics, by the names of ``metrics.jsonl``; they go out with the next update."""
        self._row |= {name: None if value is None else float(value) for name, value in values.items()}

    def checkpoint(self, step: int, created: str) -> None:
        """Keep which checkpoint is the newest; it goes out with the next update."""
        self._checkpoint = (step, datetime.fromisoformat(created).timestamp())

    def update(self, *, at_once: bool = False, first: bool = False) -> None:
        """Write the state where the last time is ``interval_s`` ago, or ``at_once``.

        Raises:
            MonitoringFileUnwritable: the ``first`` time. Later, a warning says so.
        """
        if not self.enabled or not (at_once or time.monotonic() - self._written_at >= self._settings.interval_s):
            return
        self._render()
        for key, path in list(self._files.items()):
            try:
                if path.is_relative_to(self._config.run_dir):
                    path.parent.mkdir(parents=True, exist_ok=True)
                replace_text(path, self._texts[1] + "\n" if key == "health_file" else self._texts[0])
            except OSError as error:
                reason = error.strerror or str(error)
                if first:
                    name = f"exp_manager.monitoring.{key}"
                    raise MonitoringFileUnwritable(key=name, path=str(path), reason=reason) from error
                del self._files[key]
                _log.warning("exp_manager.monitoring.%s: %s gets no more updates: %s", key, path, reason)

    def close(self) -> None:
        """Close the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _render(self) -> None:
        self._written_at, now = time.monotonic(), time.time()
        counts = {key: None if (count := self._row.get(key)) is None else int(count) for key in _COUNTS}
        health = {
            "run": self._config.run.name,
            "state": self._state,
            "error": self._error,
            "step": counts["step"],
            "max_steps": self.max_steps,
            "consumed_tokens": counts["consumed_tokens"],
            "loss": self._row.get("loss"),
            "tokens_per_s": self._row.get("tokens_per_s"),
            "checkpoint_step": None if self._checkpoint is None else self._checkpoint[0],
            "started": time.strftime(_DATE, time.gmtime(self._started)),
            "updated": time.strftime(_DATE, time.gmtime(now)),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "world_size": self._world_size,
            "run_dir": str(self._config.run_dir.absolute()),
        }
        samples: list[Sample] = [
            ("nxdt_run_info", 1, self._facts),
            *(("nxdt_state", int(state == self._state), {"state": state}) for state in STATES),
            ("nxdt_started_timestamp_seconds", self._started, {}),
            ("nxdt_updated_timestamp_seconds", now, {}),
            ("nxdt_max_steps", self.max_steps, {}),
        ]
        if self._checkpoint is not None:
            samples.append(("nxdt_checkpoint_step", self._checkpoint[0], {}))
            samples.append(("nxdt_checkpoint_timestamp_seconds", self._checkpoint[1], {}))
        for column, value in self._row.items():
            if value is None or column in _LEFT_OUT:
                continue
            if column in _COLUMNS:
                samples.append((_COLUMNS[column], value, {}))
            elif column.startswith(_VALIDATION):
                name, _, data_set = column.removeprefix(_VALIDATION).partition("/")
                samples.append(("nxdt_validation_metric", value, {"metric": name, "set": data_set}))
            else:
                samples.append(("nxdt_train_metric", value, {"metric": column}))
        self._texts = (exposition(samples, {"run": self._config.run.name}), strict_json(health), now)


@contextmanager
def monitored(config: ResolvedConfig, ranks: RankAgreement) -> Iterator[Monitor]:
    """Return a monitor that says how the block ends where it fails. Collective.

    Raises:
        MonitoringFileUnwritable, MonitoringPortUnusable: on all ranks.
    """
    monitor = Monitor(config, world_size=ranks.world_size, writes=ranks.rank == 0)
    try:
        ranks.on_rank_zero(monitor.begin)
        yield monitor
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            monitor.enter("interrupted")
        else:
            monitor.enter("failed", error)
        raise
    finally:
        monitor.close()


@final
class MonitorReports(Callback):
    """Updates the monitor after steps and batches of validations; reads no value from the device."""

    def __init__(self, monitor: Monitor, metrics: MetricsWriter) -> None:
        self._monitor = monitor
        self._metrics = metrics

    def on_fit_start(self, run: Run) -> None:
        """Say that training begins."""
        self._take(run)
        self._monitor.enter("running")

    def on_step_end(self, run: Run) -> None:
        """Say which step is done."""
        self._take(run)
        self._monitor.update()

    def on_validation_batch_end(self, run: Run) -> None:
        """Show that a validation makes progress."""
        self._monitor.update()

    def on_validation_end(self, run: Run) -> None:
        """Take the metrics of the validation."""
        self._monitor.row({name: value for name, value in run.metrics.items() if name.startswith("val_")})
        self._monitor.update()

    def close(self, run: Run) -> None:
        """Take a checkpoint that was committed since the last step."""
        self._take(run)

    def _take(self, run: Run) -> None:
        state, newest = run.session.state, run.saved or run.session.resumed
        counters = {name: getattr(state, name) for name in ("step", "consumed_samples", "consumed_tokens")}
        self._monitor.row({**self._metrics.last, **counters})
        if newest is not None:
            self._monitor.checkpoint(newest.step, newest.created)


def mark_failed(config: ResolvedConfig, text: str, *, interrupted: bool = False) -> None:
    """Mark the run as failed or interrupted in those of its files that still describe it as running.

    Files of a run directory that a living process owns stay unchanged: they are those of another run, which this one
    could not replace.

    The first rank may have ended with a different exception because another rank had died. The code in the text then
    replaces the name of that exception.

    Args:
        config: of the run. With ``use_datetime_version``, files below its directory are not found and stay unchanged.
        text: what the launcher prints about the failure; the code in it becomes the error.
        interrupted: whether a signal stopped it at once.
    """
    settings, code = config.run.exp_manager.monitoring, re.search(r"\[(NXDT-[A-Z0-9]+)\]", text)
    state = "interrupted" if interrupted else "failed"
    files = {key: getattr(settings, key) for key in ("health_file", "metrics_file")}
    paths = {key: config.run_dir / Path(name).expanduser() for key, name in files.items() if name is not None}
    if not paths or (code and code[1] == StoreInUse.code):
        return
    from nxdt_core.checkpoint.ownership import is_owned

    with suppress(OSError, StorageError):
        if is_owned(directory_lock(config.run_dir)):
            return
    with suppress(OSError, ValueError, KeyError, RecursionError):
        path = paths["health_file"]
        health = json_object(read_text(path))
        has_consequence = health["state"] == "failed" and not str(health.get("error")).startswith("NXDT-")
        if health["state"] in _LIVING or (code and has_consequence):
            replace_text(path, strict_json({**health, "state": state, "error": code and code[1]}) + "\n")
    with suppress(OSError, ValueError, KeyError, RecursionError):
        path = paths["metrics_file"]
        metrics = read_text(path)
        if any(re.search(rf'^nxdt_state{{.*state="{living}"}} 1$', metrics, re.MULTILINE) for living in _LIVING):
            none = re.sub(r"^(nxdt_state{.*}) 1$", r"\1 0", metrics, flags=re.MULTILINE)
            replace_text(path, re.sub(rf'^(nxdt_state{{.*state="{state}"}}) 0$', r"\1 1", none, flags=re.MULTILINE))
