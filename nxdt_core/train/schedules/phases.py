"""What several schedules are made of: the warm-up, the end, the lowest factor.

Warm-up follows NeMo's convention, ``(step + 1) / (warmup_steps + 1)``: the first step already learns, and the
first step after the warm-up has the full rate.
"""

from __future__ import annotations

from nxdt_core.errors.training import ScheduleHasNoEnd
from nxdt_core.protocols.schedule import LRSchedule, ScheduleHorizon

__all__ = ["end_of", "floor_of", "share_left", "until", "warmup"]


def warmup(step: int, warmup_steps: int) -> float:
    """Return the factor during the warm-up, 1 after it."""
    return (step + 1) / (warmup_steps + 1) if step < warmup_steps else 1.0


def share_left(step: int, start: int, end: int) -> float:
    """1 at ``start``, falling evenly to 0 at ``end`` and beyond; 0 where there is nothing between them."""
    return 0.0 if step >= end else (end - step) / (end - start)


def until(end: int, floor: float, curve: LRSchedule) -> LRSchedule:
    """``curve`` up to and with step ``end``, then ``floor``."""
    return lambda step: floor if step > end else curve(step)


def floor_of(min_lr: float, horizon: ScheduleHorizon) -> float:
    """``min_lr`` as a factor on the peak rate."""
    return min(1.0, min_lr / horizon.lr) if horizon.lr > 0 else 0.0


def end_of(name: str, horizon: ScheduleHorizon) -> int:
    """Return the step at which the curve ``name`` has come to its end.

    Raises:
        ScheduleHasNoEnd: neither the curve nor the run has one.
    """
    if horizon.max_steps <= 0:
        raise ScheduleHasNoEnd(schedule=name)
    return horizon.max_steps
