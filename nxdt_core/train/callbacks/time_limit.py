"""``trainer.max_time``: a run that ends itself before a scheduler does, and resumes when it is started again."""

from __future__ import annotations

import signal
import time
from typing import final

from nxdt_core.callback import Callback, Run
from nxdt_core.train.callbacks.signals import StopSignals

__all__ = ["TimeLimit"]


@final
class TimeLimit(Callback):
    """Asks for a stop as SIGTERM would, once ``limit_s`` have passed since it was made.

    The first rank's clock decides for all. A resumed run has the whole limit again: else the second of two jobs with
    the same limit would stop at once.

    Args:
        limit_s: seconds.
        signals: stops the run.
    """

    def __init__(self, limit_s: float, signals: StopSignals) -> None:
        self._ends_at_s = time.monotonic() + limit_s
        self._signals = signals

    def on_step_end(self, run: Run) -> None:
        """Look at the clock, unless the run ends here anyway."""
        self._look(run)

    def on_validation_batch_end(self, run: Run) -> None:
        """Look at the clock during a validation, too."""
        self._look(run)

    def _look(self, run: Run) -> None:
        if run.rank == 0 and time.monotonic() >= self._ends_at_s and run.step < run.max_steps:
            self._signals.request(signal.SIGTERM, because="trainer.max_time is over")
