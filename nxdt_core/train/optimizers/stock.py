"""Torch's own optimizers, which work element by element: what they do to shards is what they do to the whole."""

from __future__ import annotations

from typing import Any

import torch

from nxdt_core.distributed.devices import profile_of
from nxdt_core.protocols.optimizer import ParameterGroup, as_torch
from nxdt_core.train.optimizers.config import (
    AdadeltaConfig,
    AdagradConfig,
    AdamaxConfig,
    AdamConfig,
    AdamWConfig,
    RMSpropConfig,
    RpropConfig,
    SGDConfig,
)

__all__ = ["adadelta", "adagrad", "adam", "adamax", "adamw", "fused_kernels", "rmsprop", "rprop", "sgd"]


def adamw(groups: list[ParameterGroup], config: AdamWConfig) -> torch.optim.Optimizer:
    """Torch's AdamW; learning rate and weight decay are those of each group."""
    return torch.optim.AdamW(as_torch(groups), **_adam(groups, config))


def adam(groups: list[ParameterGroup], config: AdamConfig) -> torch.optim.Optimizer:
    """Return torch's Adam over ``groups``."""
    return torch.optim.Adam(as_torch(groups), **_adam(groups, config))


def sgd(groups: list[ParameterGroup], config: SGDConfig) -> torch.optim.Optimizer:
    """Return torch's SGD over ``groups``."""
    return torch.optim.SGD(
        as_torch(groups), momentum=config.momentum, dampening=config.dampening, nesterov=config.nesterov
    )


def adadelta(groups: list[ParameterGroup], config: AdadeltaConfig) -> torch.optim.Optimizer:
    """Return torch's Adadelta over ``groups``."""
    return torch.optim.Adadelta(as_torch(groups), rho=config.rho, eps=config.eps)


def adamax(groups: list[ParameterGroup], config: AdamaxConfig) -> torch.optim.Optimizer:
    """Return torch's Adamax over ``groups``."""
    return torch.optim.Adamax(as_torch(groups), betas=config.betas, eps=config.eps)


def adagrad(groups: list[ParameterGroup], config: AdagradConfig) -> torch.optim.Optimizer:
    """Return torch's Adagrad over ``groups``."""
    return torch.optim.Adagrad(
        as_torch(groups),
        lr_decay=config.lr_decay,
        initial_accumulator_value=config.initial_accumulator_value,
        eps=config.eps,
    )


def rmsprop(groups: list[ParameterGroup], config: RMSpropConfig) -> torch.optim.Optimizer:
    """Return torch's RMSprop over ``groups``."""
    return torch.optim.RMSprop(
        as_torch(groups), alpha=config.alpha, eps=config.eps, momentum=config.momentum, centered=config.centered
    )


def rprop(groups: list[ParameterGroup], config: RpropConfig) -> torch.optim.Optimizer:
    """Return torch's Rprop over ``groups``."""
    return torch.optim.Rprop(as_torch(groups), etas=config.etas, step_sizes=config.step_sizes)


def fused_kernels(groups: list[ParameterGroup]) -> bool:
    """Return whether the parameters' device has torch's fused kernels."""
    return profile_of(next(p.device for group in groups for p in group["params"])).fused_optimizers


def _adam(groups: list[ParameterGroup], config: AdamConfig) -> dict[str, Any]:
    return {
        "betas": config.betas,
        "eps": config.eps,
        "fused": fused_kernels(groups) if config.fused is None else config.fused,
        "capturable": config.capturable,
    }
