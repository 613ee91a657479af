"""Keeps the state of a run and writes it for other programs, where ``exp_manager.monitoring`` asks for it."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, final, get_args

from nxdt_core import __version__
from nxdt_core.callback import Callback, Run
from nxdt_core.config import ResolvedConfig
from nxdt_core.errors import NxdtError
from nxdt_core.errors.training import MonitoringFileUnwritable, MonitoringPortUnusable
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.run.callbacks.metrics import MetricsWriter
from nxdt_core.run.callbacks.prometheus import MonitorServer, Sample, exposition, samples_of_row
from nxdt_core.run.log import strict_json
from nxdt_core.system.regular_files import replace_text

_log = logging.getLogger(__name__)

State = Literal["starting", "running", "finished", "stopped", "interrupted", "failed"]
STATES: tuple[State, ...] = get_args(State)


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
        self._server: MonitorServer | None = None
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
        if self.enabled:
            self._render()
        for key, path in self._files.items():
            try:
                self._write(key, path)
            except OSError as error:
                raise MonitoringFileUnwritable(
                    key=f"exp_manager.monitoring.{key}", path=str(path), reason=error.strerror or str(error)
                ) from error
        if self._serves:
            host, port = self._settings.host, self._settings.port or 0
            try:
                self._server = MonitorServer(host, port, lambda: self._texts)
                self.url = self._server.url
            except (OSError, UnicodeError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise MonitoringPortUnusable(port=port, host=host, reason=reason) from error

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

    def update(self, *, at_once: bool = False) -> None:
        """Write the state where the last time is ``interval_s`` ago."""
        if not self.enabled or not (at_once or time.monotonic() - self._written_at >= self._settings.interval_s):
            return
        self._render()
        for key, path in list(self._files.items()):
            try:
                self._write(key, path)
            except OSError as error:
                del self._files[key]
                reason = error.strerror or str(error)
                _log.warning("exp_manager.monitoring.%s: %s gets no more updates: %s", key, path, reason)

    def close(self) -> None:
        """Close the port."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _write(self, key: str, path: Path) -> None:
        if path.is_relative_to(self._config.run_dir):
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, self._texts[1] + "\n" if key == "health_file" else self._texts[0])

    def _render(self) -> None:
        self._written_at, now = time.monotonic(), time.time()
        self._texts = (self._metrics(now), strict_json(self._health(now)), now)

    def _health(self, now: float) -> dict[str, Any]:
        return {
            "run": self._config.run.name,
            "state": self._state,
            "error": self._error,
            "step": _whole(self._row.get("step")),
            "max_steps": self.max_steps,
            "consumed_tokens": _whole(self._row.get("consumed_tokens")),
            "loss": self._row.get("loss"),
            "tokens_per_s": self._row.get("tokens_per_s"),
            "checkpoint_step": None if self._checkpoint is None else self._checkpoint[0],
            "started": _date(self._started),
            "updated": _date(now),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "world_size": self._world_size,
            "run_dir": str(self._config.run_dir.absolute()),
        }

    def _metrics(self, now: float) -> str:
        def samples() -> Iterator[Sample]:
            yield Sample("nxdt_run_info", 1, self._facts)
            for state in STATES:
                yield Sample("nxdt_state", int(state == self._state), {"state": state})
            yield Sample("nxdt_started_timestamp_seconds", self._started)
            yield Sample("nxdt_updated_timestamp_seconds", now)
            yield Sample("nxdt_max_steps", self.max_steps)
            if self._checkpoint is not None:
                yield Sample("nxdt_checkpoint_step", self._checkpoint[0])
                yield Sample("nxdt_checkpoint_timestamp_seconds", self._checkpoint[1])
            yield from samples_of_row(self._row)

        return exposition(samples(), {"run": self._config.run.name})


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


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


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
        counters = {
            "step": state.step,
            "consumed_samples": state.consumed_samples,
            "consumed_tokens": state.consumed_tokens,
        }
        self._monitor.row({**self._metrics.last, **counters})
        if newest is not None:
            self._monitor.checkpoint(newest.step, newest.created)
