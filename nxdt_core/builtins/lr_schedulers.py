"""Built-in learning-rate curves, each a pure function of the step. No torch here.

Warm-up follows NeMo's convention, ``(step + 1) / (warmup_steps + 1)``: the first step already learns, and the
first step after the warm-up has the full rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from nxdt_core.errors import ScheduleHasNoEnd
from nxdt_core.protocols.lr_scheduler import LRSchedule, ScheduleHorizon

__all__ = [
    "ConstantConfig",
    "CosineAnnealingConfig",
    "LinearAnnealingConfig",
    "WSDConfig",
    "constant",
    "cosine_annealing",
    "linear_annealing",
    "warmup_stable_decay",
]

_Shape = Callable[[float], float]
"""Share of the decay that is done, 0 to 1, to the height that is left, 1 to 0."""


@dataclass(kw_only=True)
class ConstantConfig:
    """Warm-up, then the full rate for ever."""

    warmup_steps: int = field(default=0, metadata={"doc": "Optimizer steps of linear warm-up."})

    def check(self) -> Iterable[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work."""
        if self.warmup_steps < 0:
            yield "warmup_steps", "must not be negative"


@dataclass(kw_only=True)
class LinearAnnealingConfig(ConstantConfig):
    """Warm-up, then a straight line to ``min_lr`` at ``max_steps``."""

    min_lr: float = field(default=0.0, metadata={"doc": "Learning rate at the end (absolute, not a share)."})

    def check(self) -> Iterable[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work."""
        yield from ConstantConfig.check(self)
        if self.min_lr < 0:
            yield "min_lr", "must not be negative"


@dataclass(kw_only=True)
class CosineAnnealingConfig(LinearAnnealingConfig):
    """Warm-up, then half a cosine to ``min_lr``, then ``constant_steps`` at ``min_lr``."""

    constant_steps: int = field(default=0, metadata={"doc": "Steps at min_lr before max_steps is reached."})

    def check(self) -> Iterable[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work."""
        yield from LinearAnnealingConfig.check(self)
        if self.constant_steps < 0:
            yield "constant_steps", "must not be negative"


@dataclass(kw_only=True)
class WSDConfig(LinearAnnealingConfig):
    """Warm-up, the full rate, and a decay over the last ``decay_steps``."""

    decay_steps: int | None = field(
        default=None, metadata={"doc": "Length of the decay that ends at max_steps; null: a tenth of max_steps."}
    )
    decay_shape: Literal["linear", "cosine", "sqrt"] = field(
        default="linear", metadata={"doc": "linear, cosine, or sqrt: 1 - sqrt(share of the decay that is done)."}
    )

    def check(self) -> Iterable[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work."""
        yield from LinearAnnealingConfig.check(self)
        if self.decay_steps is not None and self.decay_steps <= 0:
            yield "decay_steps", "must be positive"


def constant(config: ConstantConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, then 1."""
    return lambda step: _warmup(step, config.warmup_steps)


def linear_annealing(config: LinearAnnealingConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, then linear to ``min_lr`` at the horizon."""
    end, floor = _end("LinearAnnealingWithWarmUp", horizon), _floor(config, horizon)
    return lambda step: _decayed(step, config.warmup_steps, config.warmup_steps, end, floor, _linear)


def cosine_annealing(config: CosineAnnealingConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, then ``min + (1 - min) (1 + cos(pi t)) / 2`` (Loshchilov & Hutter 2017, arXiv:1608.03983)."""
    end, floor = _end("CosineAnnealing", horizon) - config.constant_steps, _floor(config, horizon)
    return lambda step: _decayed(step, config.warmup_steps, config.warmup_steps, end, floor, _cosine)


def warmup_stable_decay(config: WSDConfig, horizon: ScheduleHorizon) -> LRSchedule:
    """Linear warm-up, 1, then the decay."""
    end, floor = _end("WSD", horizon), _floor(config, horizon)
    decay_steps = max(1, end // 10) if config.decay_steps is None else config.decay_steps
    shape = {"linear": _linear, "cosine": _cosine, "sqrt": _sqrt}[config.decay_shape]
    start = max(config.warmup_steps, end - decay_steps)
    return lambda step: _decayed(step, config.warmup_steps, start, end, floor, shape)


def _decayed(step: int, warmup: int, start: int, end: int, floor: float, shape: _Shape) -> float:
    if step < start:
        return _warmup(step, warmup)
    share = 1.0 if step >= end else (step - start) / (end - start)
    return floor + (1.0 - floor) * shape(share)


def _warmup(step: int, warmup_steps: int) -> float:
    return (step + 1) / (warmup_steps + 1) if step < warmup_steps else 1.0


def _linear(share: float) -> float:
    return 1.0 - share


def _cosine(share: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * share))


def _sqrt(share: float) -> float:
    return 1.0 - math.sqrt(share)


def _floor(config: LinearAnnealingConfig, horizon: ScheduleHorizon) -> float:
    return min(1.0, config.min_lr / horizon.lr) if horizon.lr > 0 else 0.0


def _end(name: str, horizon: ScheduleHorizon) -> int:
    if horizon.max_steps <= 0:
        raise ScheduleHasNoEnd(schedule=name)
    return horizon.max_steps
