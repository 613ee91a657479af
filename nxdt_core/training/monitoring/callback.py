"""Reports the progress of a run to the monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl

from nxdt_core.training.callbacks.metrics import MetricsWriter
from nxdt_core.training.monitoring.monitor import Monitor

if TYPE_CHECKING:
    from nxdt_core.training.lightning.module import NxdtModule

__all__ = ["MonitorReports"]


class MonitorReports(pl.Callback):
    """Updates the monitor after steps and batches of validations; reads no value from the device."""

    def __init__(self, monitor: Monitor, metrics: MetricsWriter) -> None:
        self._monitor = monitor
        self._metrics = metrics

    def on_train_start(self, trainer: pl.Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """Say that training begins."""
        self._take(pl_module)
        self._monitor.enter("running")

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: NxdtModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Say which step is done."""
        self._take(pl_module)
        self._monitor.update()

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show that a validation makes progress."""
        self._monitor.update()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """Take the metrics of the validation."""
        if not trainer.sanity_checking:
            self._monitor.row(
                {name: value for name, value in trainer.callback_metrics.items() if name.startswith("val_")}
            )
            self._monitor.update()

    def on_train_end(self, trainer: pl.Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """Take the last checkpoint."""
        self._take(pl_module)

    def on_exception(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: NxdtModule, exception: BaseException
    ) -> None:
        """Take a checkpoint that was committed since the last step."""
        if hasattr(pl_module, "model"):
            self._take(pl_module)

    def _take(self, module: NxdtModule) -> None:
        state, newest = module.train_state, module.saved or module.resumed
        counters = {
            "step": state.step,
            "consumed_samples": state.consumed_samples,
            "consumed_tokens": state.consumed_tokens,
        }
        self._monitor.row({**self._metrics.last, **counters})
        if newest is not None:
            self._monitor.checkpoint(newest.step, newest.created)
