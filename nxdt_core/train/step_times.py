"""How much slower the steps after a save are than those before it. Torch-free."""

from __future__ import annotations

from collections import deque

__all__ = ["STEPS", "StepTimes"]

STEPS = 10
"""Steps before and after a save that are compared."""


class StepTimes:
    """Takes the time of each step, without what saves and validations took between them.

    Example::

        times = StepTimes()
        for …: times.step(seconds)
        times.mark()
        for …: times.step(seconds)
        times.slowdown      # 0.02: two per cent slower than before the mark
    """

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=STEPS)
        self._after: list[float] | None = None
        self._baseline_s: float | None = None

    def mark(self) -> None:
        """Note the start of a save. What was measured after an earlier one becomes part of what is before."""
        self._baseline_s = sum(self._before) / len(self._before) if self._before else None
        self._after = []

    def step(self, seconds: float) -> None:
        """Record the duration of a step."""
        if self._after is not None and len(self._after) < STEPS:
            self._after.append(seconds)
        self._before.append(seconds)

    @property
    def complete(self) -> bool:
        """Whether all steps after the mark that count have been."""
        return self._after is not None and len(self._after) == STEPS

    @property
    def slowdown(self) -> float | None:
        """Mean time of a step after the mark over that before it, less 1; None where there are none to compare."""
        if not self._after or not self._baseline_s:
            return None
        return sum(self._after) / len(self._after) / self._baseline_s - 1
