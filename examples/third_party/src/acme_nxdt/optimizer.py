"""Lion (Chen et al. 2023, arXiv:2302.06675): the sign of an interpolated momentum."""

from collections.abc import Callable

import torch

from acme_nxdt.config import LionConfig
from nxdt_core.protocols.optimizer import ParameterGroup


class Lion(torch.optim.Optimizer):
    """The class itself is the component's factory: nxdt calls ``Lion(groups, config)``."""

    def __init__(self, groups: list[ParameterGroup], config: LionConfig) -> None:
        super().__init__(groups, {"betas": config.betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update."""
        for group in self.param_groups:
            beta_update, beta_momentum = group["betas"]
            for weight in group["params"]:
                if weight.grad is not None:
                    momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                    update = momentum.lerp(weight.grad, 1 - beta_update).sign_()
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
                    momentum.lerp_(weight.grad, 1 - beta_momentum)
