"""Attention with sinks: a trained score per head takes part in the softmax and has no value, as in gpt-oss
(arXiv:2508.10925).

Fused kernels have no room for the score. They return the log-sum-exp of the others, by which the output is rescaled.
Backward is theirs, given the log-sum-exp that includes the sink: a value of zero adds nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from nxdt_core.models.attention.grouped_query import AttentionSemantics
from nxdt_core.models.attention.partial_attention import (
    AttentionGradients,
    Block,
    MergedAttention,
    Window,
    contiguous_heads,
    sink_gradients,
)
from nxdt_core.models.autocast import compute_dtype
from nxdt_core.protocols.step_context import StepContext


class SinkAttention(nn.Module):
    """A core as :class:`~nxdt_core.models.attention.grouped_query.CausalAttention`, whose call has the sinks."""

    def __init__(self, *, scale: float | None = None, window: int | None = None) -> None:
        """``scale`` and ``window``: as of :class:`~nxdt_core.models.attention.grouped_query.AttentionSemantics`."""
        super().__init__()
        self.scale, self.window = scale, window

    def semantics(self) -> AttentionSemantics:
        """Return what ``forward`` computes without the sinks, which its caller has."""
        return AttentionSemantics(causal=True, scale=self.scale, window=self.window)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
        *,
        sinks: torch.Tensor,
    ) -> torch.Tensor:
        """Return the attention, as wide as ``value``.

        Args:
            query: [batch, heads, seq, head_dim].
            key: [batch, kv_heads, seq, head_dim].
            value: as ``key``.
            document_ids: int64 [batch, seq]; None: one document per row.
            step: unused, since no mask is kept.
            sinks: [heads], in the units of scores.
        """
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        window = None if self.window is None or self.window >= query.shape[2] else self.window
        dtype = compute_dtype(query)  # autocast does not know the function
        heads = (contiguous_heads(tensor.to(dtype)) for tensor in (query, key, value))
        attended: torch.Tensor = _Attention.apply(*heads, sinks, document_ids, scale, window)  # type: ignore[no-untyped-call]
        return attended


def _block(seq: int, document_ids: torch.Tensor | None, window: int | None) -> Block:
    """Return the block of all tokens with themselves and those before them."""
    return Block(
        rows=slice(0, seq),
        keys=slice(0, seq),
        diagonal=True,
        documents=None if document_ids is None else (document_ids, document_ids),
        window=None if window is None else Window(length=window, distance=0),
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor,
        document_ids: torch.Tensor | None,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        merged = MergedAttention(query, value, scale)
        merged.add(_block(query.shape[2], document_ids, window), key, value)
        output, lse = merged.result(sinks)
        ctx.save_for_backward(query, key, value, sinks, document_ids, output, lse)
        ctx.scale, ctx.window = scale, window
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, document_ids, output, lse = ctx.saved_tensors
        sums = AttentionGradients(grad, query, value, output, lse, ctx.scale)
        of_key, of_value = (torch.zeros_like(tensor, dtype=sums.query.dtype) for tensor in (key, value))
        sums.add(_block(query.shape[2], document_ids, ctx.window), key, value, of_key, of_value)
        of_sinks = sink_gradients(grad, output, lse, sinks)
        return sums.query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_sinks, None, None, None
