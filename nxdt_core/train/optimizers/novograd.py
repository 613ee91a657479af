"""NovoGrad (Ginsburg et al. 2019, arXiv:1905.11286): gradients normalised by a running norm of each whole parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nxdt_core.protocols.optimizer import ParameterGroup, as_torch, shards_of
from nxdt_core.train.optimizers.config import NovogradConfig
from nxdt_core.train.optimizers.pieces import square_sum, sum_over_pieces, trained_pieces

__all__ = ["Novograd"]


class Novograd(torch.optim.Optimizer):
    """One running mean a weight and one running square a parameter."""

    def __init__(self, groups: list[ParameterGroup], config: NovogradConfig) -> None:
        defaults = {"betas": config.betas, "eps": config.eps, "grad_averaging": config.grad_averaging}
        super().__init__(as_torch(groups), defaults)
        self._shards = shards_of(groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        trained = trained_pieces(self.param_groups, self._shards)
        squares = [square_sum(piece.grad) for piece in trained]
        sum_over_pieces(trained, squares)
        for piece, square in zip(trained, squares, strict=True):
            group, state = piece.group, self.state[piece.parameter]
            beta1, beta2 = group["betas"]
            if not state:
                state["exp_avg"] = torch.zeros_like(piece.parameter)
                state["exp_avg_sq"] = square
            else:
                state["exp_avg_sq"].lerp_(square, 1 - beta2)
            update = piece.grad.div_((state["exp_avg_sq"].sqrt() + group["eps"]).to(piece.grad.dtype))
            update.add_(piece.weight, alpha=group["weight_decay"])
            if group["grad_averaging"]:
                update.mul_(1 - beta1)
            mean = piece.real(state["exp_avg"])
            mean.mul_(beta1).add_(update)
            piece.weight.add_(mean, alpha=-group["lr"])
