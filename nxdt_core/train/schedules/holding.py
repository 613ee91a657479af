"""Curves that hold the rate or fall without heading for an end."""

from __future__ import annotations

from nxdt_core.protocols.schedule import LRSchedule, ScheduleHorizon
from nxdt_core.train.schedules.config import (
    AnnealingConfig,
    ExponentialConfig,
    HoldConfig,
    NoamConfig,
    NoamHoldConfig,
    StepConfig,
    WarmupConfig,
)
from nxdt_core.train.schedules.phases import end_of, floor_of, until, warmup

__all__ = [
    "constant",
    "exponential",
    "inverse_square_root",
    "noam",
    "noam_hold",
    "stairs",
    "warmup_hold",
    "warmup_policy",
]


def constant(config: WarmupConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Return a schedule of linear warm-up, then 1."""
    return lambda step: warmup(step, config.warmup_steps)


def warmup_policy(config: AnnealingConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, then 1, and ``min`` after the horizon."""
    curve = constant(config, horizon)
    return until(end_of("WarmupPolicy", horizon), floor_of(config.min_lr, horizon), curve)


def warmup_hold(config: HoldConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Return the policy with a hold; where the hold ends after the horizon, the factor stays 1 until then."""
    held = config.warmup_steps + config.hold_steps - 1
    end = max(held, end_of("WarmupHoldPolicy", horizon))
    return until(end, floor_of(config.min_lr, horizon), constant(config, horizon))


def inverse_square_root(config: AnnealingConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, then ``sqrt((warmup_steps + 1) / (step + 1))``, and ``min`` after the horizon."""
    start = config.warmup_steps

    def factor(step: int) -> float:
        return warmup(step, start) if step < start else float(((start + 1) / (step + 1)) ** 0.5)

    return until(end_of("InverseSquareRootAnnealing", horizon), floor_of(config.min_lr, horizon), factor)


def noam(config: NoamConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """``d_model ** -0.5 * min(step ** -0.5, step * warmup_steps ** -1.5)`` (Vaswani et al. 2017, arXiv:1706.03762)."""
    start, scale = config.warmup_steps, config.d_model**-0.5
    floor = floor_of(config.min_lr, horizon)

    def factor(step: int) -> float:
        step = max(1, step)
        if step <= start:
            return float(scale * step * start**-1.5)
        return float(max(floor, scale * step**-0.5))

    return factor


def noam_hold(config: NoamHoldConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Warm-up, hold, then ``(warmup_steps / (step - hold_steps)) ** decay_rate``, at least ``min`` (Kim et al. 2022,
    arXiv:2206.00888)."""
    start, rate = config.warmup_steps, config.decay_rate
    floor = floor_of(config.min_lr, horizon)

    def factor(step: int) -> float:
        if step < start + config.hold_steps:
            return warmup(step, start)
        return float(max(floor, (start / (step - config.hold_steps)) ** rate))

    return until(end_of("NoamHoldAnnealing", horizon), floor, factor)


def stairs(config: StepConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """``gamma ** (step // step_size)``, as ``torch.optim.lr_scheduler.StepLR``."""
    return lambda step: float(config.gamma ** (step // config.step_size))


def exponential(config: ExponentialConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """``gamma ** step``, as ``torch.optim.lr_scheduler.ExponentialLR``."""
    return lambda step: float(config.gamma**step)
