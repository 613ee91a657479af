"""Kind ``schedule``: the learning rate as a pure function of the step, with no state to save or restore.

Example::

    def constant(config: ConstantConfig, horizon: ScheduleHorizon) -> LRSchedule:
        return lambda step: min(1.0, (step + 1) / max(1, config.warmup_steps))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["LRSchedule", "ScheduleFactory", "ScheduleHorizon"]

LRSchedule = Callable[[int], float]
"""``schedule(step)``: factor on each group's ``lr`` for the optimizer step number ``step``, counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleHorizon:
    """Values that a schedule may depend on in addition to its own section."""

    max_steps: int
    """Steps after which the schedule has ended: ``model.optim.sched.max_steps``, else ``trainer.max_steps``."""
    lr: float
    """Peak learning rate ``model.optim.lr``; schedules with an absolute ``min_lr`` divide by it."""


class ScheduleFactory(Protocol):
    """The target of the kind: a callable. ``config`` is the section ``model.optim.sched``."""

    def __call__(self, config: Any, horizon: ScheduleHorizon) -> LRSchedule:
        """Return the schedule for a run of ``horizon``, from the section."""
