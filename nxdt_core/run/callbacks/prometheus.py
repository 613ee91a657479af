"""Metrics of a run in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from nxdt_core.system.http_server import Handler, Server

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric."""

    metric: str
    """A key of the table below."""
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


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
_LEFT_OUT = frozenset({"checkpoint_age_s", "checkpoint_gb_per_s", "checkpoint_slowdown"})
"""Columns that follow from others, or that are ``null`` at most steps."""
_VALIDATION = "val_"
_ESCAPES = {"\\": r"\\", '"': r"\"", "\n": r"\n"}
_SPECIAL = re.compile(r'[\\"\n]')


def samples_of_row(row: Mapping[str, float | None]) -> Iterator[Sample]:
    """Yield the samples of columns of ``metrics.jsonl``, and of validation metrics as loggers name them."""
    for column, value in row.items():
        if value is None or column in _LEFT_OUT:
            continue
        if column in _COLUMNS:
            yield Sample(_COLUMNS[column], value)
        elif column.startswith(_VALIDATION):
            name, _, data_set = column.removeprefix(_VALIDATION).partition("/")
            yield Sample("nxdt_validation_metric", value, {"metric": name, "set": data_set})
        else:
            yield Sample("nxdt_train_metric", value, {"metric": column})


def exposition(samples: Iterable[Sample], labels: Mapping[str, str]) -> str:
    """Return the text of ``samples``, each with ``labels`` as well, by metric in the order of the table."""
    by_metric: dict[str, list[Sample]] = {}
    for sample in samples:
        by_metric.setdefault(sample.metric, []).append(sample)
    lines = []
    for name, (kind, text) in _METRICS.items():
        if name in by_metric:
            lines += [f"# HELP {name} {text}.", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_labels({**labels, **each.labels})} {_number(each.value)}" for each in by_metric[name]]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    pairs = (f'{name}="{_SPECIAL.sub(lambda found: _ESCAPES[found[0]], text)}"' for name, text in labels.items())
    return f"{{{','.join(pairs)}}}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


class MonitorServer:
    """Answers ``/metrics`` and ``/health`` until it is closed.

    Args:
        host: address to listen at.
        port: TCP port; 0 takes a free one.
        texts: returns the metrics, the health document, and when they were written (seconds since 1970).

    Raises:
        OSError: the address or port cannot be used.
    """

    def __init__(self, host: str, port: int, texts: Callable[[], tuple[str, str, float]]) -> None:
        self._server = Server(host, port, _handler(texts))
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}"
        """Address on which the server listens."""
        threading.Thread(target=self._server.serve_forever, name="nxdt-monitoring", daemon=True).start()

    def close(self) -> None:
        """Stop to listen."""
        self._server.shutdown()
        self._server.server_close()


def _handler(texts: Callable[[], tuple[str, str, float]]) -> type[Handler]:
    class MonitorHandler(Handler):
        def respond(self) -> None:
            """Answer a scrape or a probe."""
            path, _, query = self.path.partition("?")
            metrics, health, written = texts()
            if path == "/metrics":
                self.answer(200, CONTENT_TYPE, metrics)
            elif path == "/health":
                self._health(health, written, parse_qs(query).get("max_age", []))
            else:
                self.answer(404, "text/plain", "There are /metrics and /health.\n")

        def _health(self, health: str, written: float, limits: list[str]) -> None:
            """503 for a run that failed, or whose state is older than a probe accepts."""
            try:
                oldest = min(map(float, limits), default=None)
            except ValueError:
                self.answer(400, "text/plain", "max_age is a number of seconds.\n")
                return
            stale = oldest is not None and time.time() - written > oldest
            failed = json.loads(health)["state"] == "failed"
            self.answer(503 if stale or failed else 200, "application/json", health)

    return MonitorHandler
