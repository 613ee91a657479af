"""The optimizers, learning-rate schedules and precisions as components. Imports no torch."""

from __future__ import annotations

from nxdt_core.api import Component

__all__ = ["OPTIMIZERS", "POLICIES", "SCHEDULES"]

_OPTIMIZERS = "nxdt_core.train.optimizers"


def _optimizer(name: str, target: str, config: str, summary: str) -> Component:
    return Component(
        name=name,
        target=f"{_OPTIMIZERS}.{target}",
        config=f"{_OPTIMIZERS}.config:{config}",
        summary=summary,
        capabilities=frozenset({"sharded"}),
    )


OPTIMIZERS = (
    _optimizer(
        "adamw",
        "elementwise:adamw",
        "AdamWConfig",
        "AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), torch's fused or foreach kernels",
    ),
    _optimizer(
        "adamw_fp32OptState",
        "elementwise:adamw_fp32_state",
        "AdamWConfig",
        "AdamW with float32 state over parameters of any dtype",
    ),
    _optimizer("adam", "elementwise:adam", "AdamConfig", "Adam (Kingma & Ba 2015, arXiv:1412.6980), torch's"),
    _optimizer("sgd", "elementwise:sgd", "SGDConfig", "gradient descent with momentum, torch's"),
    _optimizer(
        "adafactor",
        "whole_parameters:Adafactor",
        "AdafactorConfig",
        "Adafactor (Shazeer & Stern 2018, arXiv:1804.04235), factored over whole matrices in any layout",
    ),
    _optimizer("lion", "elementwise:Lion", "LionConfig", "Lion (Chen et al. 2023, arXiv:2302.06675)"),
    _optimizer(
        "muon",
        "muon:Muon",
        "MuonConfig",
        "Muon (Jordan et al. 2024) for whole hidden matrices in any layout, AdamW for the rest",
    ),
    _optimizer(
        "novograd", "whole_parameters:Novograd", "NovogradConfig", "NovoGrad (Ginsburg et al. 2019, arXiv:1905.11286)"
    ),
    _optimizer(
        "adadelta", "elementwise:adadelta", "AdadeltaConfig", "Adadelta (Zeiler 2012, arXiv:1212.5701), torch's"
    ),
    _optimizer("adamax", "elementwise:adamax", "AdamaxConfig", "Adamax (Kingma & Ba 2015, arXiv:1412.6980), torch's"),
    _optimizer("adagrad", "elementwise:adagrad", "AdagradConfig", "Adagrad (Duchi et al. 2011), torch's"),
    _optimizer("rmsprop", "elementwise:rmsprop", "RMSpropConfig", "RMSprop (Tieleman & Hinton 2012), torch's"),
    _optimizer("rprop", "elementwise:rprop", "RpropConfig", "Rprop (Riedmiller & Braun 1993), torch's"),
)
"""All of them, under the names of torch and NxD Training."""


_SCHEDULES = "nxdt_core.train.schedules"


def _schedule(name: str, target: str, config: str, summary: str, *aliases: str) -> Component:
    return Component(
        name=name, target=f"{_SCHEDULES}:{target}", config=f"{_SCHEDULES}:{config}", summary=summary, aliases=aliases
    )


SCHEDULES = (
    _schedule(
        "CosineAnnealing",
        "cosine_annealing",
        "CosineAnnealingConfig",
        "linear warm-up, cosine to min_lr, constant_steps at min_lr",
        "cosine",
    ),
    _schedule(
        "LinearAnnealingWithWarmUp",
        "linear_annealing",
        "AnnealingConfig",
        "linear warm-up, then linear to min_lr",
        "linear",
        "WarmupAnnealing",
    ),
    _schedule(
        "PolynomialDecayAnnealing",
        "polynomial",
        "PolynomialConfig",
        "linear warm-up, hold_steps at lr, then a power of what is left to min_lr",
        "polynomial",
        "PolynomialHoldDecayAnnealing",
    ),
    _schedule(
        "SquareAnnealing",
        "square_annealing",
        "SquareAnnealingConfig",
        "linear warm-up, then the square of what is left, at least min_lr",
    ),
    _schedule(
        "SquareRootAnnealing",
        "square_root_annealing",
        "AnnealingConfig",
        "linear warm-up, then the root of what is left of the whole run, at least min_lr",
    ),
    _schedule(
        "WSD",
        "warmup_stable_decay",
        "WSDConfig",
        "warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395)",
        "wsd",
    ),
    _schedule("constant", "constant", "WarmupConfig", "linear warm-up, then constant"),
    _schedule("WarmupPolicy", "warmup_policy", "AnnealingConfig", "linear warm-up, then lr; min_lr after max_steps"),
    _schedule(
        "WarmupHoldPolicy",
        "warmup_hold",
        "HoldConfig",
        "linear warm-up, then lr, for hold_steps at least; min_lr after max_steps",
        "WarmupHold",
    ),
    _schedule(
        "InverseSquareRootAnnealing",
        "inverse_square_root",
        "AnnealingConfig",
        "linear warm-up, then falling with the root of the step; min_lr after max_steps",
        "inverse_square_root",
    ),
    _schedule(
        "NoamAnnealing",
        "noam",
        "NoamConfig",
        "the curve of Vaswani et al. 2017, arXiv:1706.03762; lr is a factor",
        "Noam",
    ),
    _schedule(
        "NoamHoldAnnealing",
        "noam_hold",
        "NoamHoldConfig",
        "linear warm-up, hold_steps at lr, then a power of the step (Kim et al. 2022, arXiv:2206.00888)",
    ),
    _schedule("StepLR", "stairs", "StepConfig", "torch's: gamma every step_size steps"),
    _schedule("ExponentialLR", "exponential", "ExponentialConfig", "torch's: gamma at every step"),
)
"""All of them, under NeMo's and torch's names."""


_PRECISIONS = "nxdt_core.train.precision"

_BFLOAT16 = ("bf16", "bfloat16", "bf16-mixed", "mixed")

POLICIES = (
    Component(
        name="fp32",
        target=f"{_PRECISIONS}:fp32",
        summary="everything in float32",
        suggested_for=("float32", "32-true", "32", "float", "no"),
    ),
    Component(
        name="mixed_precision",
        target=f"{_PRECISIONS}:mixed_precision",
        requires=frozenset({"dtype:bfloat16", "master_weights", "gradient_dtype"}),
        summary="bfloat16 compute; float32 masters, sums of gradients and optimizer state",
        suggested_for=(*_BFLOAT16, "fp16", "float16", "16-mixed"),
    ),
    Component(
        name="mixed_precisionSR",
        target=f"{_PRECISIONS}:mixed_precision_sr",
        requires=frozenset({"dtype:bfloat16", "master_weights", "gradient_dtype", "stochastic_rounding"}),
        summary="mixed_precision, masters rounded stochastically to the bfloat16 that is computed with",
        aliases=("mixed_precision_SR",),
    ),
    Component(
        name="bf16SR",
        target=f"{_PRECISIONS}:bf16_sr",
        config=f"{_PRECISIONS}:BF16SRConfig",
        requires=frozenset({"dtype:bfloat16", "stochastic_rounding"}),
        summary="bfloat16 weights and gradients without masters, updates rounded stochastically",
        suggested_for=("bf16-true",),
    ),
    Component(
        name="autocast",
        target=f"{_PRECISIONS}:autocast",
        requires=frozenset({"autocast"}),
        summary="float32 parameters, bfloat16 compute under torch.autocast",
        suggested_for=(*_BFLOAT16, "amp"),
    ),
    Component(
        name="manual",
        target=f"{_PRECISIONS}:manual",
        config=f"{_PRECISIONS}:ManualConfig",
        summary="by NxD Training's switches: master_weights, fp32_grad_acc, xla_downcast_bf16, ...",
    ),
)
"""All of them, under the names of NxD Training."""
