"""``trainer.max_time``: a run that ends itself before a scheduler does, and resumes when it is started again."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl

from nxdt_core.training.callbacks.signals import StopSignals

if TYPE_CHECKING:
    from nxdt_core.training.lightning.module import NxdtModule

__all__ = ["TimeLimit"]


class TimeLimit(pl.Callback):
    """Asks for a stop as SIGTERM would, once ``limit_s`` have passed since it was made.

    The first rank's clock decides for all. (Lightning's ``Timer`` lets each rank decide by its own clock, and counts
    over resumes: the second of two jobs with the same limit would stop at once.)

    Args:
        limit_s: seconds.
        signals: stops the run.
    """

    def __init__(self, limit_s: float, signals: StopSignals) -> None:
        self._ends_at_s = time.monotonic() + limit_s
        self._signals = signals

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: NxdtModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the clock, unless the run ends here anyway."""
        self._look(trainer, pl_module)

    def on_validation_batch_end(  # type: ignore[override]
        self,
        trainer: pl.Trainer,
        pl_module: NxdtModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Look at the clock during a validation, too."""
        self._look(trainer, pl_module)

    def _look(self, trainer: pl.Trainer, pl_module: NxdtModule) -> None:
        over = trainer.is_global_zero and time.monotonic() >= self._ends_at_s
        if over and pl_module.train_state.step < trainer.max_steps:
            self._signals.request(signal.SIGTERM, because="trainer.max_time is over")
