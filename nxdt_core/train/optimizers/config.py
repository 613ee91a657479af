"""Sections of ``model.optim`` for the built-in optimizers. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from nxdt_core.config.section import NonNegativeFloat, PositiveInt, Range, Section

Positive = Annotated[float, Range(1e-300, None)]


class OptimizerConfig(Section):
    """Keys of every optimizer."""

    lr: NonNegativeFloat = 1e-3
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay, added to the gradient as the gradient of ``weight_decay / 2 * |w| ** 2``."""


class BetasConfig(OptimizerConfig):
    """Running means of the gradient and of its square."""

    betas: tuple[NonNegativeFloat, NonNegativeFloat] = (0.9, 0.999)
    """Decay of the running mean and of the running square."""
    eps: Positive = 1e-8
    """Added to the root of the running square."""

    def check(self) -> Iterable[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work."""
        if not all(beta < 1 for beta in self.betas):
            yield "betas", "each must be below 1"


class AdamConfig(BetasConfig):
    """Adam; its weight decay is a part of the gradient."""

    fused: bool | None = None
    """Use torch's fused kernel, or a compiled one on accelerators with ``model.compile``; null: where the device has
    one. false: foreach, unless the device is the CPU."""
    capturable: bool = False
    """Keep the step counter on the device."""


class AdamWConfig(AdamConfig):
    """AdamW, with torch's defaults except where the older schema had its own."""

    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of matrices and embeddings."""


class SGDConfig(OptimizerConfig):
    """Gradient descent."""

    momentum: NonNegativeFloat = 0.0
    """Share of the last update in the next; 0 keeps no state."""
    dampening: NonNegativeFloat = 0.0
    """Share of the gradient that the momentum leaves out."""
    nesterov: bool = False
    """Look ahead by one momentum."""

    def check(self) -> Iterable[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work."""
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            yield "nesterov", "needs a momentum above 0 and no dampening"


class AdadeltaConfig(OptimizerConfig):
    """Adadelta."""

    rho: Annotated[float, Range(0.0, 1.0)] = 0.9
    """Decay of the running squares."""
    eps: Positive = 1e-6
    """Added below the roots."""


class AdamaxConfig(BetasConfig):
    """Adamax, torch's."""


class AdagradConfig(OptimizerConfig):
    """Adagrad."""

    lr_decay: NonNegativeFloat = 0.0
    """Divides the rate by ``1 + steps * lr_decay``."""
    initial_accumulator_value: NonNegativeFloat = 0.0
    """Initial value of the sum of squares."""
    eps: Positive = 1e-10
    """Added to the root of the sum."""


class RMSpropConfig(OptimizerConfig):
    """RMSprop."""

    alpha: Annotated[float, Range(0.0, 1.0)] = 0.99
    """Decay of the running square."""
    eps: Positive = 1e-8
    """Added to its root."""
    momentum: NonNegativeFloat = 0.0
    """Share of the last update in the next."""
    centered: bool = False
    """Divide by the standard deviation instead."""


class RpropConfig(OptimizerConfig):
    """Rprop: step sizes by the gradient's sign alone."""

    etas: tuple[Positive, Positive] = (0.5, 1.2)
    """Factors on a step size when the sign has changed, and when it has not."""
    step_sizes: tuple[Positive, Positive] = (1e-6, 50.0)
    """Smallest and largest step size."""

    def check(self) -> Iterable[tuple[str, str]]:
        """Yield (key, problem) for values that cannot work."""
        if self.weight_decay:
            yield "weight_decay", "must be 0: Rprop reads the gradient's sign, in which no decay shows"
        if not self.etas[0] < 1 < self.etas[1]:
            yield "etas", "the first must be below 1 and the second above"


class AdafactorConfig(OptimizerConfig):
    """Adafactor as torch has it: ``lr`` is the most that the relative step may be."""

    lr: NonNegativeFloat = 1e-2
    """Largest relative step; each step takes ``min(lr, 1 / sqrt(step))`` times the parameter's own size."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    beta2_decay: Annotated[float, Range(None, 0.0)] = -0.8
    """Exponent of the step by which new squares count less."""
    eps: tuple[Positive | None, Positive] = (None, 1e-3)
    """Lowest root of the squares (null: the dtype's precision), and lowest size of a parameter."""
    d: Annotated[float, Range(1.0, None)] = 1.0
    """Root mean square that an update is clipped to."""


class LionConfig(OptimizerConfig):
    """Lion; rates are 3 to 10 times below AdamW's, decays as much above."""

    lr: NonNegativeFloat = 1e-4
    """Peak learning rate: how far every weight moves."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    betas: tuple[Annotated[float, Range(0.0, 1.0)], Annotated[float, Range(0.0, 1.0)]] = (0.9, 0.99)
    """Share of the momentum in the update's sign, and in the momentum itself."""


class NovogradConfig(BetasConfig):
    """NovoGrad: Adam with one running square a parameter."""

    betas: tuple[NonNegativeFloat, NonNegativeFloat] = (0.95, 0.98)
    """Decay of the running mean and of the running square."""
    weight_decay: NonNegativeFloat = 0.0
    """Decay, added to the gradient once that is normalised."""
    grad_averaging: bool = False
    """Take ``1 - betas[0]`` of each gradient, so that the mean is one."""


class MuonConfig(BetasConfig):
    """Muon for the matrices of hidden layers, AdamW for all else (``betas``, ``eps``)."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of both."""
    betas: tuple[NonNegativeFloat, NonNegativeFloat] = (0.9, 0.95)
    """Betas of AdamW."""
    momentum: Annotated[float, Range(0.0, 1.0)] = 0.95
    """Share of the running mean that an update keeps."""
    nesterov: bool = True
    """Look ahead by one momentum."""
    ns_steps: PositiveInt = 5
    """Iterations that make an update orthogonal."""
    ns_dtype: Literal["bfloat16", "float32"] | None = None
    """Dtype of these iterations. ``null``: bfloat16, and float32 on a host, which has no fast bfloat16."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """``match_rms_adamw`` scales updates to the size of AdamW's, so that ``lr`` suits both (Liu et al. 2025,
    arXiv:2502.16982); ``original`` by ``sqrt(max(1, rows / columns))``."""
    adamw_params: tuple[str, ...] = ()
    """Patterns of further parameters to leave to AdamW, as ``*.router.weight``. Embeddings, the output head, norms and
    biases always are."""
