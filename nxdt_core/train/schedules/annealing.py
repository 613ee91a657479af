"""Curves that fall to ``min_lr`` at the horizon."""

from __future__ import annotations

import math
from collections.abc import Callable

from nxdt_core.protocols.schedule import LRSchedule, ScheduleHorizon
from nxdt_core.train.schedules.config import (
    AnnealingConfig,
    CosineAnnealingConfig,
    PolynomialConfig,
    SquareAnnealingConfig,
    WSDConfig,
)
from nxdt_core.train.schedules.phases import end_of, floor_of, share_left, warmup

__all__ = [
    "cosine_annealing",
    "linear_annealing",
    "polynomial",
    "square_annealing",
    "square_root_annealing",
    "warmup_stable_decay",
]


def linear_annealing(config: AnnealingConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, then linear to ``min_lr`` at the horizon."""
    return _between(config, horizon, config.warmup_steps, end_of("LinearAnnealingWithWarmUp", horizon), _linear)


def cosine_annealing(config: CosineAnnealingConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, then ``min + (1 - min) (1 + cos(pi t)) / 2`` (Loshchilov & Hutter 2017, arXiv:1608.03983)."""
    end = end_of("CosineAnnealing", horizon) - config.constant_steps
    return _between(config, horizon, config.warmup_steps, end, _cosine)


def polynomial(config: PolynomialConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, ``hold_steps`` at 1, then ``min + (1 - min) (share left) ** power``."""
    start = config.warmup_steps + config.hold_steps
    end = end_of("PolynomialDecayAnnealing", horizon)
    return _between(config, horizon, start, end, lambda left: left**config.power)


def warmup_stable_decay(config: WSDConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, 1, then the decay (Hu et al. 2024, arXiv:2404.06395)."""
    end = end_of("WSD", horizon)
    decay_steps = max(1, end // 10) if config.decay_steps is None else config.decay_steps
    shape = {"linear": _linear, "cosine": _cosine, "sqrt": _sqrt}[config.decay_shape]
    return _between(config, horizon, max(config.warmup_steps, end - decay_steps), end, shape)


def square_annealing(config: SquareAnnealingConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, then ``max(min, (share left) ** 2)``."""
    return _clipped(config, horizon, config.warmup_steps, end_of("SquareAnnealing", horizon), 2.0)


def square_root_annealing(config: AnnealingConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, then ``max(min, (share of the whole run that is left) ** 0.5)``."""
    return _clipped(config, horizon, 0, end_of("SquareRootAnnealing", horizon), 0.5)


def _between(
    config: AnnealingConfig, horizon: ScheduleHorizon, start: int, end: int, shape: Callable[[float], float]
) -> LRSchedule:
    """Warm-up to ``start``, then from 1 to the floor at ``end`` by ``shape``, which maps the share left to height."""
    floor = floor_of(config.min_lr, horizon)

    def factor(step: int) -> float:
        if step < start:
            return warmup(step, config.warmup_steps)
        return floor + (1.0 - floor) * shape(share_left(step, start, end))

    return factor


def _clipped(config: AnnealingConfig, horizon: ScheduleHorizon, start: int, end: int, power: float) -> LRSchedule:
    """Warm-up, then a power of the share that is left of ``start`` to ``end``, and never less than the floor."""
    floor = floor_of(config.min_lr, horizon)

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return warmup(step, config.warmup_steps)
        return float(max(floor, share_left(step, start, end) ** power))

    return factor


def _linear(left: float) -> float:
    return left


def _cosine(left: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * (1.0 - left)))


def _sqrt(left: float) -> float:
    return 1.0 - math.sqrt(1.0 - left)
