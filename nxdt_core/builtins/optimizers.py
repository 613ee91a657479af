"""Built-in optimizers: factories over parameter groups that the engine has made."""

from __future__ import annotations

import torch

from nxdt_core.builtins.optimizer_config import AdamWConfig
from nxdt_core.devices import profile_of
from nxdt_core.protocols.optimizer import ParameterGroup

__all__ = ["adamw"]


def adamw(groups: list[ParameterGroup], config: AdamWConfig) -> torch.optim.Optimizer:
    """Build torch's AdamW; learning rate and weight decay are those of each group."""
    return torch.optim.AdamW(
        [dict(group) for group in groups],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=_fused(groups) if config.fused is None else config.fused,
        capturable=config.capturable,
    )


def _fused(groups: list[ParameterGroup]) -> bool:
    """Whether the parameters' device has torch's fused kernels."""
    return profile_of(next(p.device for group in groups for p in group["params"])).fused_optimizers
