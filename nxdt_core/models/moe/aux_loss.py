"""Auxiliary losses (router balance and the like) that join the gradient without passing through the model's output."""

from __future__ import annotations

from typing import Any

import torch

from nxdt_core.models.step_border import step_of
from nxdt_core.protocols.step_context import StepContext

__all__ = ["add_aux_loss"]


def add_aux_loss(hidden: torch.Tensor, aux: torch.Tensor, step: StepContext | None = None) -> torch.Tensor:
    """Return ``hidden`` unchanged, and let backward through it also follow the gradient of the scalar ``aux``.

    ``aux`` is a sum over the micro-batch's tokens, like the main loss. ``step``, the model's argument of that name, has
    the factor that makes both parts of the global batch's loss
    (:attr:`~nxdt_core.protocols.step_context.StepContext.aux_loss_scale`).
    """
    joined: torch.Tensor = _Join.apply(hidden, aux, step_of(step).aux_loss_scale)  # type: ignore[no-untyped-call]
    return joined


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
