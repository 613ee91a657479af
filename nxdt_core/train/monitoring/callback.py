"""Reports the progress of a run to the monitor."""

from __future__ import annotations

from typing import final

from nxdt_core.callback import Callback, Run
from nxdt_core.train.callbacks.metrics import MetricsWriter
from nxdt_core.train.monitoring.monitor import Monitor

__all__ = ["MonitorReports"]


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
