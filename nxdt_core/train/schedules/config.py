"""Sections of ``model.optim.sched`` for the built-in curves. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from nxdt_core.config.annotations import NonNegativeFloat, NonNegativeInt, PartOf, PositiveInt, Range

__all__ = [
    "AnnealingConfig",
    "CosineAnnealingConfig",
    "ExponentialConfig",
    "HoldConfig",
    "NoamConfig",
    "NoamHoldConfig",
    "PolynomialConfig",
    "SquareAnnealingConfig",
    "StepConfig",
    "WSDConfig",
    "WarmupConfig",
]

_OF_THE_CURVE = PartOf("model.optim.sched.max_steps")


@dataclass(kw_only=True)
class WarmupConfig:
    """Warm-up, then the full rate for ever."""

    reads_max_steps: ClassVar[bool] = False
    """Whether ``max_steps`` ends the schedule; a plugin's schedule without this attribute is taken to read it."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up; the first one already learns."""


@dataclass(kw_only=True)
class AnnealingConfig(WarmupConfig):
    """Warm-up, then down to ``min_lr`` at ``max_steps``."""

    reads_max_steps: ClassVar[bool] = True
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end (absolute, not a share)."""


@dataclass(kw_only=True)
class CosineAnnealingConfig(AnnealingConfig):
    """Warm-up, then half a cosine to ``min_lr``, then ``constant_steps`` at ``min_lr``."""

    constant_steps: Annotated[NonNegativeInt, _OF_THE_CURVE] = 0
    """Steps at min_lr before max_steps is reached."""


@dataclass(kw_only=True)
class SquareAnnealingConfig(AnnealingConfig):
    """Warm-up, then a parabola that stops at ``min_lr``."""

    min_lr: NonNegativeFloat = 1e-5
    """Learning rate below which it does not fall (absolute; the default is NeMo's)."""


@dataclass(kw_only=True)
class HoldConfig(AnnealingConfig):
    """Warm-up, then the full rate for ``hold_steps`` before what follows."""

    hold_steps: Annotated[NonNegativeInt, _OF_THE_CURVE] = 0
    """Steps at the full rate after the warm-up."""


@dataclass(kw_only=True)
class PolynomialConfig(HoldConfig):
    """Warm-up, hold, then ``(share that is left) ** power`` to ``min_lr``."""

    power: Annotated[float, Range(0.0, None)] = 1.0
    """Exponent of the decay; 1 is a straight line."""


@dataclass(kw_only=True)
class NoamConfig(AnnealingConfig):
    """The curve of the first transformer; ``lr`` is a factor on it, and not the peak."""

    reads_max_steps: ClassVar[bool] = False
    d_model: PositiveInt
    """Width of the model, whose root divides the rate."""


@dataclass(kw_only=True)
class NoamHoldConfig(HoldConfig):
    """Warm-up to ``lr``, hold, then a power of the step to ``min_lr``."""

    warmup_steps: PositiveInt
    """Optimizer steps of linear warm-up, which also set the pace of the decay."""
    decay_rate: Annotated[float, Range(0.0, None)] = 0.5
    """Exponent of the decay: 0.5 falls as Noam does, 1 faster."""


@dataclass(kw_only=True)
class StepConfig:
    """Stairs: the rate is multiplied by ``gamma`` every ``step_size`` steps."""

    reads_max_steps: ClassVar[bool] = False
    step_size: PositiveInt
    """Optimizer steps of one stair."""
    gamma: Annotated[float, Range(0.0, None)] = 0.1
    """Factor from one stair to the next."""


@dataclass(kw_only=True)
class ExponentialConfig:
    """The rate is multiplied by ``gamma`` at every step."""

    reads_max_steps: ClassVar[bool] = False
    gamma: Annotated[float, Range(0.0, None)]
    """Factor from one step to the next."""


@dataclass(kw_only=True)
class WSDConfig(AnnealingConfig):
    """Warm-up, the full rate, and a decay over the last ``decay_steps``."""

    decay_steps: Annotated[PositiveInt | None, _OF_THE_CURVE] = None
    """Length of the decay that ends at max_steps; null: a tenth of max_steps."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """linear, cosine, or sqrt: 1 - sqrt(share of the decay that is done)."""
