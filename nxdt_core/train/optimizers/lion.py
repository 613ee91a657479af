"""Lion (Chen et al. 2023, arXiv:2302.06675): the sign of an interpolated momentum."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nxdt_core.protocols.optimizer import ParameterGroup, as_torch
from nxdt_core.train.optimizers.config import LionConfig

__all__ = ["Lion"]


class Lion(torch.optim.Optimizer):
    """One running mean a weight; every weight moves by the learning rate."""

    def __init__(self, groups: list[ParameterGroup], config: LionConfig) -> None:
        super().__init__(as_torch(groups), {"betas": config.betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            grads = [p.grad for p in weights]
            means = [self._mean(p) for p in weights]
            in_update, in_mean = group["betas"]
            updates = torch._foreach_lerp(means, grads, 1 - in_update)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
            torch._foreach_lerp_(means, grads, 1 - in_mean)

    def _mean(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        mean: torch.Tensor = state["exp_avg"]
        return mean
