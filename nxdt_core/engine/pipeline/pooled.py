"""Shares of experts' assignments that a loss pools over the layers of all stages of a pipeline.

Forward sends the sum over the layers so far with the hidden states. The last stage has it of all layers, and its
gradient, which goes back from stage to stage, is that sum: each stage knows it before the backward of its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nxdt_core.protocols.step_context import ALL_LAYERS

__all__ = ["sent_back", "sent_on"]


class _SentOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carried: torch.Tensor, own: torch.Tensor, shares: dict[int, torch.Tensor]) -> torch.Tensor:
        ctx.shares = shares
        return carried + own

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.shares[ALL_LAYERS] = grad
        return grad, None, None


class _SentBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, carried: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        ctx.total = total
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, ctx.total, None


def sent_on(carried: torch.Tensor, own: Sequence[torch.Tensor], shares: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return the sum over the layers of this stage and those before, for the next stage.

    Args:
        carried: float32 [experts], the sum over the layers before; it requires a gradient.
        own: those of each layer of this stage.
        shares: ``pooled_shares`` of the micro-batch's context; backward adds the sum over all layers.
    """
    result: torch.Tensor = _SentOn.apply(carried, sum(own, torch.zeros_like(carried)), shares)  # type: ignore[no-untyped-call]
    return result


def sent_back(
    logits: torch.Tensor, carried: torch.Tensor, own: Sequence[torch.Tensor], shares: dict[int, torch.Tensor]
) -> torch.Tensor:
    """Return ``logits`` of the last stage unchanged, and add the sum over all layers to ``shares``, and to the gradient
    of ``carried``. The other arguments are those of :func:`sent_on`."""
    shares[ALL_LAYERS] = sum(own, carried.detach())
    result: torch.Tensor = _SentBack.apply(logits, carried, shares[ALL_LAYERS])  # type: ignore[no-untyped-call]
    return result
