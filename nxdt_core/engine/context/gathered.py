"""Context parallel attention to gathered keys and values: each rank has all of them for a moment, and saves its own.

One collective a direction where the ring has as many hops as ranks, at the price of a whole sequence of keys and values
in memory while a layer runs. They are gathered again in backward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from nxdt_core.distributed.collectives import scatter_sum_along
from nxdt_core.engine.context.attention.block import GradientSums, Merged
from nxdt_core.engine.context.attention.kernel import Gradients, accumulation_dtype
from nxdt_core.engine.context.blocks import Sharing, local_blocks, prefix_blocks
from nxdt_core.engine.context.documents import DocumentChunks
from nxdt_core.engine.context.zigzag import in_order, shard_of
from nxdt_core.torch_versions import all_gather_single

__all__ = ["gathered_backward", "gathered_forward"]

_SEQUENCE = 2
"""The dimension of queries, keys and values that is sharded."""


def gathered_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sharing: Sharing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute :func:`~nxdt_core.engine.context.ring.ring_forward` by one all-gather."""
    layout = _layout(sharing, key)
    gathering = _Gathering(key, value, sharing.group)
    merged = Merged(query, value, sharing.scale)
    for block in local_blocks(*layout):
        merged.add(block, key, value)
    keys, values = gathering.whole()
    for block in prefix_blocks(*layout):
        merged.add(block, keys, values)
    return merged.result()


def gathered_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    sharing: Sharing,
) -> Gradients:
    """Compute :func:`~nxdt_core.engine.context.ring.ring_backward` by one all-gather and one reduce-scatter."""
    layout, group = _layout(sharing, key), sharing.group
    gathering = _Gathering(key, value, group)
    sums = GradientSums(grad, query, value, output, lse, sharing.scale)
    dtype = accumulation_dtype(key.dtype)
    grad_key, grad_value = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
    for block in local_blocks(*layout):
        sums.add(block, key, value, grad_key, grad_value)
    keys, values = gathering.whole()
    grad_whole = keys.new_zeros((*keys.shape[:-1], keys.shape[-1] + values.shape[-1]), dtype=dtype)
    grad_keys, grad_values = grad_whole.tensor_split((keys.shape[-1],), -1)
    for block in prefix_blocks(*layout):
        sums.add(block, keys, values, grad_keys, grad_values)
    narrow = grad_whole.to(key.dtype)  # as keys and values travel
    shards = [shard_of(narrow, rank, group.size(), _SEQUENCE) for rank in range(group.size())]
    summed = scatter_sum_along(torch.stack(shards), 0, group)[0]
    grad_key += summed[..., : key.shape[-1]]
    grad_value += summed[..., key.shape[-1] :]
    return sums.query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _layout(sharing: Sharing, key: torch.Tensor) -> tuple[int, int, int, DocumentChunks | None, int | None]:
    group = sharing.group
    return group.rank(), group.size(), key.shape[_SEQUENCE] // 2, sharing.documents, sharing.window


class _Gathering:
    """Keys and values of all ranks on their way here."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._key_width = key.shape[-1]
        self._own_key_value = torch.cat((key, value), -1)  # one message; kept until it has left
        self._all = self._own_key_value.new_empty((group.size(), *self._own_key_value.shape))
        flat = self._all.flatten(0, 1)  # gloo knows no other form
        self._work = all_gather_single(flat, self._own_key_value, group=group, async_op=True)

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the keys and values and return them: [batch, kv_heads, seq, head_dim] of the whole sequence in its
        own order."""
        assert self._work is not None
        self._work.wait()
        keys, values = in_order(self._all.unbind(0), _SEQUENCE).tensor_split((self._key_width,), -1)
        return keys, values
