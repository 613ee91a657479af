"""Context parallel attention to gathered keys and values: each rank has all of them for a moment, and saves its own.

One collective a direction where the ring has as many hops as ranks, at the price of a whole sequence of keys and values
in memory while a layer runs. They are gathered anew in backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from nxdt_core.parallel.collectives import scatter_sum_along
from nxdt_core.parallel.context.attention.block import GradientSums, Merged
from nxdt_core.parallel.context.attention.kernel import accumulation_dtype
from nxdt_core.parallel.context.blocks import local_blocks, prefix_blocks
from nxdt_core.parallel.context.documents import DocumentChunks
from nxdt_core.parallel.context.zigzag import in_order, shard_of

__all__ = ["gathered_attention"]

_SEQUENCE = 2
"""The dimension of queries, keys and values that is sharded."""


def gathered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    group: dist.ProcessGroup,
    documents: DocumentChunks | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """As :func:`~nxdt_core.parallel.context.ring.ring_attention`, by one all-gather; one reduce-scatter in backward."""
    output: torch.Tensor = _Gathered.apply(  # type: ignore[no-untyped-call]
        query, key, value, scale, group, documents, window
    )
    return output


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        group: dist.ProcessGroup,
        documents: DocumentChunks | None,
        window: int | None,
    ) -> torch.Tensor:
        layout = (group.rank(), group.size(), key.shape[_SEQUENCE] // 2, documents, window)
        gathering = _Gathering(key, value, group)
        merged = Merged(query, value, scale)
        for block in local_blocks(*layout):
            merged.add(block, key, value)
        keys, values = gathering.whole()
        for block in prefix_blocks(*layout):
            merged.add(block, keys, values)
        output, lse = merged.result()
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.scale, ctx.group, ctx.layout = scale, group, layout
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        gathering = _Gathering(key, value, ctx.group)
        sums = GradientSums(grad, query, value, output, lse, ctx.scale)
        dtype = accumulation_dtype(key.dtype)
        grad_key, grad_value = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
        for block in local_blocks(*ctx.layout):
            sums.add(block, key, value, grad_key, grad_value)
        keys, values = gathering.whole()
        grad_whole = keys.new_zeros((*keys.shape[:-1], keys.shape[-1] + values.shape[-1]), dtype=dtype)
        grad_keys, grad_values = grad_whole.tensor_split((keys.shape[-1],), -1)
        for block in prefix_blocks(*ctx.layout):
            sums.add(block, keys, values, grad_keys, grad_values)
        shards = [shard_of(grad_whole, rank, ctx.group.size(), _SEQUENCE) for rank in range(ctx.group.size())]
        summed = scatter_sum_along(torch.stack(shards), 0, ctx.group)[0]
        grad_key += summed[..., : key.shape[-1]]
        grad_value += summed[..., key.shape[-1] :]
        return sums.query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None, None


class _Gathering:
    """Keys and values of all ranks on their way here."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._key_width = key.shape[-1]
        self._own = torch.cat((key, value), -1)  # one message; kept until it has left
        self._all = self._own.new_empty((group.size(), *self._own.shape))
        flat = self._all.flatten(0, 1)  # gloo knows no other form
        self._work = dist.all_gather_single(flat, self._own, group=group, async_op=True)

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait; keys and values [batch, kv_heads, seq, head_dim] of the whole sequence in its own order."""
        assert self._work is not None
        self._work.wait()
        keys, values = in_order(self._all.unbind(0), _SEQUENCE).tensor_split((self._key_width,), -1)
        return keys, values
