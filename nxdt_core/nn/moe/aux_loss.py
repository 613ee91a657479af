"""Auxiliary losses (router balance and the like) that join the gradient without passing through the model's output."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from nxdt_core.nn.scoped import Scoped

__all__ = ["add_aux_loss", "aux_loss_scale"]

_SCALE: Scoped[float | torch.Tensor] = Scoped(1.0)


def add_aux_loss(hidden: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
    """Return ``hidden`` unchanged, and let backward through it also follow the gradient of the scalar ``aux``.

    ``aux`` is a sum over the micro-batch's tokens, like the main loss: what the step divides that by (the weight of
    the global batch) it announces through :func:`aux_loss_scale` around forward.
    """
    joined: torch.Tensor = _Join.apply(hidden, aux, _SCALE.value)  # type: ignore[no-untyped-call]
    return joined


def aux_loss_scale(scale: float | torch.Tensor) -> AbstractContextManager[None]:
    """Multiply auxiliary losses by ``scale`` within the block; outside, the factor is 1."""
    return _SCALE.set(scale)


class _Join(torch.autograd.Function):
    """The scale is read in forward: backward may run in a thread that knows nothing of the block."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, aux: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        if aux.numel() != 1:
            raise ValueError(f"aux must be a scalar, not of shape {tuple(aux.shape)}")
        ctx.scale, ctx.aux = scale, aux.new_ones(aux.shape)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, ctx.aux * ctx.scale, None
