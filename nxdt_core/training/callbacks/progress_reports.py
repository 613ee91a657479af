"""Reports the steps of a run as its progress, which shows a supervisor that it does not hang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl

from nxdt_core.progress import PROGRESS

if TYPE_CHECKING:
    from nxdt_core.training.lightning.module import NxdtModule

__all__ = ["ProgressReports"]


class ProgressReports(pl.Callback):
    """Reports each training step and each batch of a validation."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """Report the step that the run begins with."""
        PROGRESS.advance("training", step=pl_module.train_state.step)

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: NxdtModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report a completed training step to the supervisor."""
        PROGRESS.advance("training", step=pl_module.train_state.step)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report that a validation begins."""
        PROGRESS.advance("validation")

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Report a batch of a validation."""
        PROGRESS.advance("validation")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report to the supervisor that training continues."""
        PROGRESS.advance("training")
