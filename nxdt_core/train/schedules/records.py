"""The curves as components. No torch here."""

from __future__ import annotations

from nxdt_core.api import Component

__all__ = ["SCHEDULES"]

_HERE = "nxdt_core.train.schedules"


def _curve(name: str, target: str, config: str, summary: str, *aliases: str) -> Component:
    return Component(
        name=name, target=f"{_HERE}.{target}", config=f"{_HERE}.config:{config}", summary=summary, aliases=aliases
    )


SCHEDULES = (
    _curve(
        "CosineAnnealing",
        "annealing:cosine_annealing",
        "CosineAnnealingConfig",
        "linear warm-up, cosine to min_lr, constant_steps at min_lr",
        "cosine",
    ),
    _curve(
        "LinearAnnealingWithWarmUp",
        "annealing:linear_annealing",
        "AnnealingConfig",
        "linear warm-up, then linear to min_lr",
        "linear",
        "WarmupAnnealing",
    ),
    _curve(
        "PolynomialDecayAnnealing",
        "annealing:polynomial",
        "PolynomialConfig",
        "linear warm-up, hold_steps at lr, then a power of what is left to min_lr",
        "polynomial",
        "PolynomialHoldDecayAnnealing",
    ),
    _curve(
        "SquareAnnealing",
        "annealing:square_annealing",
        "SquareAnnealingConfig",
        "linear warm-up, then the square of what is left, at least min_lr",
    ),
    _curve(
        "SquareRootAnnealing",
        "annealing:square_root_annealing",
        "AnnealingConfig",
        "linear warm-up, then the root of what is left of the whole run, at least min_lr",
    ),
    _curve(
        "WSD",
        "annealing:warmup_stable_decay",
        "WSDConfig",
        "warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395)",
        "wsd",
    ),
    _curve("constant", "holding:constant", "WarmupConfig", "linear warm-up, then constant"),
    _curve(
        "WarmupPolicy", "holding:warmup_policy", "AnnealingConfig", "linear warm-up, then lr; min_lr after max_steps"
    ),
    _curve(
        "WarmupHoldPolicy",
        "holding:warmup_hold",
        "HoldConfig",
        "linear warm-up, then lr, for hold_steps at least; min_lr after max_steps",
        "WarmupHold",
    ),
    _curve(
        "InverseSquareRootAnnealing",
        "holding:inverse_square_root",
        "AnnealingConfig",
        "linear warm-up, then falling with the root of the step; min_lr after max_steps",
        "inverse_square_root",
    ),
    _curve(
        "NoamAnnealing",
        "holding:noam",
        "NoamConfig",
        "the curve of Vaswani et al. 2017, arXiv:1706.03762; lr is a factor",
        "Noam",
    ),
    _curve(
        "NoamHoldAnnealing",
        "holding:noam_hold",
        "NoamHoldConfig",
        "linear warm-up, hold_steps at lr, then a power of the step (Kim et al. 2022, arXiv:2206.00888)",
    ),
    _curve("StepLR", "holding:stairs", "StepConfig", "torch's: gamma every step_size steps"),
    _curve("ExponentialLR", "holding:exponential", "ExponentialConfig", "torch's: gamma at every step"),
)
"""All of them, under NeMo's and torch's names."""
