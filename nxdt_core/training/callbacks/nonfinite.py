"""Losses and gradients that are not finite: no weight ever sees them; a run stops here if it is configured to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl

from nxdt_core.devices import profile_of
from nxdt_core.errors.training import StepNotFinite

if TYPE_CHECKING:
    from nxdt_core.training.lightning.module import NxdtModule

__all__ = ["NonFiniteGuard"]


class NonFiniteGuard(pl.Callback):
    """Ends a run with an error after a step that was left out.

    The count of such steps is on the device. It is read every ``every`` steps, when the metrics wait for the device
    anyway, and after each step where that costs no wait. Until then such steps change nothing.

    Args:
        every: steps between two looks.
    """

    def __init__(self, every: int) -> None:
        self._every = every

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: NxdtModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look, where it is time to.

        Raises:
            StepNotFinite: on all ranks.
        """
        step = pl_module.train_state.step
        if step % self._every == 0 or step == trainer.max_steps or profile_of(pl_module.engine.device).host:
            skipped = int(pl_module.optimizer.skipped_steps)
            if skipped:
                result = pl_module.last
                raise StepNotFinite(
                    step=step, skipped=skipped, loss=float(result.loss.loss), grad_norm=float(result.grad_norm)
                )
