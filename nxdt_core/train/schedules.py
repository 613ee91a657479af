"""The learning-rate schedules: their sections of the configuration, and the factor of the learning rate at each step.

Warm-up follows NeMo's convention, ``(step + 1) / (warmup_steps + 1)``: the first step already learns, and the
first step after the warm-up has the full rate. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Literal

from nxdt_core.config.section import NonNegativeFloat, NonNegativeInt, PartOf, PositiveInt, Range, ScheduleSection
from nxdt_core.errors.training import ScheduleHasNoEnd
from nxdt_core.protocols.schedule import LRSchedule, ScheduleHorizon

_OF_THE_CURVE = PartOf("model.optim.sched.max_steps")
_SHAPES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "cosine": lambda left: 0.5 * (1.0 + math.cos(math.pi * (1.0 - left))),
    "sqrt": lambda left: 1.0 - math.sqrt(1.0 - left),
}
"""Height of a decay by the share of it that is left."""


class WarmupConfig(ScheduleSection):
    """Warm-up, then the full rate for ever."""

    reads_max_steps: ClassVar[bool] = False
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up; the first one already learns."""


class AnnealingConfig(WarmupConfig):
    """Warm-up, then down to ``min_lr``, which the rate reaches after ``max_steps`` steps."""

    reads_max_steps: ClassVar[bool] = True
    min_lr: NonNegativeFloat = 0.0
    """Learning rate after the last step of the schedule (absolute, not a share)."""


class CosineAnnealingConfig(AnnealingConfig):
    """Warm-up, then half a cosine to ``min_lr``, then ``constant_steps`` at ``min_lr``."""

    constant_steps: Annotated[NonNegativeInt, _OF_THE_CURVE] = 0
    """Steps at min_lr before max_steps is reached."""


class SquareAnnealingConfig(AnnealingConfig):
    """Warm-up, then a parabola that stops at ``min_lr``."""

    min_lr: NonNegativeFloat = 1e-5
    """Learning rate below which it does not fall (absolute; the default is NeMo's)."""


class HoldConfig(AnnealingConfig):
    """Warm-up, then the full rate for ``hold_steps`` before what follows."""

    hold_steps: Annotated[NonNegativeInt, _OF_THE_CURVE] = 0
    """Steps at the full rate after the warm-up."""


class PolynomialConfig(HoldConfig):
    """Warm-up, hold, then ``(share that is left) ** power`` to ``min_lr``."""

    power: Annotated[float, Range(0.0, None)] = 1.0
    """Exponent of the decay; 1 is a straight line."""


class NoamConfig(AnnealingConfig):
    """The curve of the first transformer; ``lr`` is a factor on it, and not the peak."""

    reads_max_steps: ClassVar[bool] = False
    d_model: PositiveInt
    """Width of the model, whose root divides the rate."""


class NoamHoldConfig(HoldConfig):
    """Warm-up to ``lr``, hold, then a power of the step to ``min_lr``."""

    warmup_steps: PositiveInt
    """Optimizer steps of linear warm-up, which also set the pace of the decay."""
    decay_rate: Annotated[float, Range(0.0, None)] = 0.5
    """Exponent of the decay: 0.5 falls as Noam does, 1 faster."""


class StepConfig(ScheduleSection):
    """Stairs: the rate is multiplied by ``gamma`` every ``step_size`` steps."""

    reads_max_steps: ClassVar[bool] = False
    step_size: PositiveInt
    """Optimizer steps of one stair."""
    gamma: Annotated[float, Range(0.0, None)] = 0.1
    """Factor from one stair to the next."""


class ExponentialConfig(ScheduleSection):
    """The rate is multiplied by ``gamma`` at every step."""

    reads_max_steps: ClassVar[bool] = False
    gamma: Annotated[float, Range(0.0, None)]
    """Factor from one step to the next."""


class WSDConfig(AnnealingConfig):
    """Warm-up, the full rate, and a decay over the last ``decay_steps``."""

    decay_steps: Annotated[PositiveInt | None, _OF_THE_CURVE] = None
    """Length of the decay that ends at max_steps; null: a tenth of max_steps."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """linear, cosine, or sqrt: 1 - sqrt(share of the decay that is done)."""


def warmup(step: int, warmup_steps: int) -> float:
    """Return the factor during the warm-up, 1 after it."""
    return (step + 1) / (warmup_steps + 1) if step < warmup_steps else 1.0


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


def linear_annealing(config: AnnealingConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, then linear to ``min_lr`` at the horizon."""
    end = end_of("LinearAnnealingWithWarmUp", horizon)
    return _falling(config, horizon, config.warmup_steps, end, _SHAPES["linear"])


def cosine_annealing(config: CosineAnnealingConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, then ``min + (1 - min) (1 + cos(pi t)) / 2`` (Loshchilov & Hutter 2017, arXiv:1608.03983)."""
    end = end_of("CosineAnnealing", horizon) - config.constant_steps
    return _falling(config, horizon, config.warmup_steps, end, _SHAPES["cosine"])


def polynomial(config: PolynomialConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, ``hold_steps`` at 1, then ``min + (1 - min) (share left) ** power``."""
    start = config.warmup_steps + config.hold_steps
    end = end_of("PolynomialDecayAnnealing", horizon)
    return _falling(config, horizon, start, end, lambda left: left**config.power)


def warmup_stable_decay(config: WSDConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, 1, then the decay (Hu et al. 2024, arXiv:2404.06395)."""
    end = end_of("WSD", horizon)
    decay_steps = max(1, end // 10) if config.decay_steps is None else config.decay_steps
    start = max(config.warmup_steps, end - decay_steps)
    return _falling(config, horizon, start, end, _SHAPES[config.decay_shape])


def square_annealing(config: SquareAnnealingConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, then ``max(min, (share left) ** 2)``."""
    end = end_of("SquareAnnealing", horizon)
    return _falling(config, horizon, config.warmup_steps, end, lambda left: left**2.0, clipped=True)


def square_root_annealing(config: AnnealingConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, then ``max(min, (share of the whole run that is left) ** 0.5)``."""
    return _falling(config, horizon, 0, end_of("SquareRootAnnealing", horizon), lambda left: left**0.5, clipped=True)


def _falling(
    config: AnnealingConfig,
    horizon: ScheduleHorizon,
    start: int,
    end: int,
    shape: Callable[[float], float],
    *,
    clipped: bool = False,
) -> LRSchedule:
    """Warm-up, 1 until ``start``, then down by ``shape``, which maps the share that is left until ``end`` to height.
    Heights are scaled to end at the floor, or where ``clipped`` are never less."""
    floor = floor_of(config.min_lr, horizon)

    def factor(step: int) -> float:
        if step < max(start, config.warmup_steps):
            return warmup(step, config.warmup_steps)
        height = shape(0.0 if step >= end else (end - step) / (end - start))
        return max(floor, height) if clipped else floor + (1.0 - floor) * height

    return factor


def constant(config: WarmupConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Return a schedule of linear warm-up, then 1."""
    return lambda step: warmup(step, config.warmup_steps)


def warmup_policy(config: AnnealingConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, then 1, and ``min`` after the horizon."""
    curve = constant(config, horizon)
    return until(end_of("WarmupPolicy", horizon), floor_of(config.min_lr, horizon), curve)


def warmup_hold(config: HoldConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Return the policy with a hold; where the hold ends after the horizon, the factor stays 1 until then."""
    last_held = config.warmup_steps + config.hold_steps - 1
    end = max(last_held, end_of("WarmupHoldPolicy", horizon))
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
