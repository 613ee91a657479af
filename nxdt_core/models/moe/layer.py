"""Mixture of experts: a router, experts of which each token uses a few, and perhaps some that all tokens use."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nxdt_core.models.mlp import SwiGLU
from nxdt_core.models.moe.dispatch import LocalDispatcher
from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.moe.router import TopKRouter
from nxdt_core.models.step_boundary import step_of
from nxdt_core.protocols.step_context import StepContext


def add_aux_loss(hidden: torch.Tensor, aux: torch.Tensor, step: StepContext | None = None) -> torch.Tensor:
    """Return ``hidden`` unchanged, and let backward through it also follow the gradient of the scalar ``aux``.

    ``aux`` is a sum over the micro-batch's tokens, like the main loss. ``step``, the model's argument of that name, has
    the factor that makes both parts of the global batch's loss
    (:attr:`~nxdt_core.protocols.step_context.StepContext.aux_loss_scale`).
    """
    return _Join.apply(hidden, aux, step_of(step).aux_loss_scale)  # type: ignore[no-untyped-call, no-any-return]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, aux: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        if aux.numel() != 1:
            raise ValueError(f"aux must be a scalar, not of shape {tuple(aux.shape)}")
        ctx.scale, ctx.aux = scale, aux.new_ones(aux.shape)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, ctx.aux * ctx.scale, None


class MixtureOfExperts(nn.Module):
    """Mixture of experts in place of a feed-forward block, with the router's auxiliary losses in the gradient. (Shazeer
    et al. 2017, arXiv:1701.06538; Fedus et al. 2021, arXiv:2101.03961.)

    In a :class:`~nxdt_core.protocols.plan.ParallelPlan` the whole module is a tensor block, ``experts`` are experts,
    ``dispatcher`` is an expert dispatcher, ``router`` an expert router, and the matrices of ``shared`` are column and
    row as in any feed-forward block.
    """

    def __init__(
        self, *, router: TopKRouter, experts: SwiGLUExperts, shared: SwiGLU | None = None, chunks: int = 1
    ) -> None:
        """``shared``: one block that all tokens pass in addition to their experts (Dai et al. 2024, arXiv:2401.06066);
        several shared experts are one of their summed width. ``chunks``: of
        :class:`~nxdt_core.models.moe.dispatch.LocalDispatcher`."""
        super().__init__()
        self.router = router
        self.dispatcher = LocalDispatcher(chunks)
        self.experts = experts
        self.shared = shared

    def forward(self, hidden: torch.Tensor, step: StepContext | None = None) -> torch.Tensor:
        """Return the layer's output, of the shape of ``hidden`` [batch, seq, hidden]."""
        routing = self.router(hidden, step)
        output: torch.Tensor = self.dispatcher.run(hidden, routing, self.experts, step=step)
        if self.shared is not None:
            output = output + self.shared(hidden)
        return output if routing.aux_loss is None else add_aux_loss(output, routing.aux_loss, step)
