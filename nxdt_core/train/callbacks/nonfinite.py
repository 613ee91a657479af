"""Losses and gradients that are not finite: no weight ever sees them; a run stops here if it is configured to."""

from __future__ import annotations

from typing import final

from nxdt_core.callback import Callback, Run
from nxdt_core.distributed.devices import profile_of
from nxdt_core.errors.training import StepNotFinite

__all__ = ["NonFiniteGuard"]


@final
class NonFiniteGuard(Callback):
    """Ends a run with an error after a step that was left out.

    The count of such steps is on the device. It is read every ``every`` steps, when the metrics wait for the device
    anyway, and after each step where that costs no wait. Until then such steps change nothing.

    Args:
        every: steps between two looks.
    """

    def __init__(self, every: int) -> None:
        self._every = every

    def on_step_end(self, run: Run) -> None:
        """Look, where it is time to.

        Raises:
            StepNotFinite: on all ranks.
        """
        session, result = run.session, run.last
        looks = run.step % self._every == 0 or run.step == run.max_steps or profile_of(session.engine.device).host
        skipped = int(session.optimizer.skipped_steps) if looks else 0
        if skipped and result is not None:
            loss, norm = float(result.loss.loss), float(result.grad_norm)
            raise StepNotFinite(step=run.step, skipped=skipped, loss=loss, grad_norm=norm)
