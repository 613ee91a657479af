"""Two ways to exchange keys and values between the ranks that share a sequence: a ring, and one all-gather.

Ring attention (Liu et al. 2023, arXiv:2310.01889): keys and values travel from rank to rank, queries stay. While a
block is computed, the next keys and values are on their way. In backward their gradients travel one step behind them:
the sum for a rank's keys starts at its neighbour and comes home after as many hops as the keys made. It travels in the
dtype of the keys, and each rank adds to it in float32.

Gathered keys and values: one collective per direction where the ring has as many hops as ranks, at the price of a whole
sequence of keys and values in memory while a layer runs. Each rank saves its own; they are gathered again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from nxdt_core.distributed.collectives import reduce_scatter_along
from nxdt_core.distributed.torch_versions import all_gather_single
from nxdt_core.engine.context.blocks import (
    ContextSequence,
    DocumentChunks,
    local_blocks,
    prefix_blocks,
    ring_blocks,
    zigzag_shard,
    zigzag_unshard,
)
from nxdt_core.models.attention.kernels import Gradients, accumulation_dtype
from nxdt_core.models.attention.partial_attention import AttentionGradients, Block, MergedAttention

_SEQUENCE = 2
"""The dimension of queries, keys and values that is sharded."""


def ring_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequence: ContextSequence
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the causal attention of this rank's queries to the keys of all ranks. Collective.

    Args:
        query: [batch, heads, seq / ranks, head_dim], the rank's zig-zag shard.
        key: [batch, kv_heads, seq / ranks, head_dim].
        value: as ``key``.
        sequence: scale, cap, ranks, documents, window and sinks.

    Returns:
        Output, as ``query`` and as wide as ``value``, and log-sum-exp. No rank ever holds more than two shards of keys
        and values.
    """
    group, merged = sequence.group, MergedAttention(query, value, sequence.scale, sequence.softcap)
    for source, keys, values in _ring_shards(key, value, group):
        for block in _blocks(sequence, source, key):
            merged.add(block, keys, values)
    return merged.result(sequence.sinks)


def ring_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    sequence: ContextSequence,
) -> Gradients:
    """Return the gradients from those of the output, and from what :func:`ring_forward` took and gave. Collective."""
    group = sequence.group
    sums = AttentionGradients(grad, query, value, output, lse, sequence.scale, sequence.softcap)
    local, travelling = _zero_gradients(key, value), None
    for source, keys, values in _ring_shards(key, value, group):
        total = local if source == group.rank() else _zero_gradients(key, value)
        grad_key, grad_value = _unpacked(total, key)
        for block in _blocks(sequence, source, key):
            sums.add(block, keys, values, grad_key, grad_value)
        if source != group.rank():
            if travelling is not None:
                total += travelling.arrived()
            travelling = _Hop(total.to(key.dtype), group)
    if travelling is not None:
        local += travelling.arrived()
    grad_key, grad_value = _unpacked(local, key)
    return sums.query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _blocks(sequence: ContextSequence, source: int, key: torch.Tensor) -> list[Block]:
    group = sequence.group
    return ring_blocks(group.rank(), source, group.size(), key.shape[2] // 2, sequence.documents, sequence.window)


def _ring_shards(
    key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (rank, its keys, its values) for every rank of the group, this one first, while the next shard is being
    received."""
    rank, ranks = group.rank(), group.size()
    packed = torch.cat((key, value), -1)  # one message a hop
    for step in range(ranks):
        following = _Hop(packed, group) if step + 1 < ranks else None
        yield (rank - step) % ranks, *_unpacked(packed, key)
        if following is not None:
            packed = following.arrived()


class _Hop:
    """A send of ``tensor`` to the next rank, and a receive of the previous rank's, both running.

    Several may be on their way at once: all ranks start them in one order, by which backends match them.
    """

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        rank, ranks = group.rank(), group.size()
        self._sent = tensor  # kept until it has left
        self._received = torch.empty_like(tensor)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % ranks),
                dist.P2POp(dist.irecv, self._received, group=group, group_peer=(rank - 1) % ranks),
            ]
        )

    def arrived(self) -> torch.Tensor:
        """Wait for both, and return what was received."""
        for work in self._works:
            work.wait()
        return self._received


def _unpacked(packed: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values, or their gradients, from one tensor [batch, kv_heads, seq, head_dim + value_dim]."""
    return packed[..., : key.shape[-1]], packed[..., key.shape[-1] :]


def _zero_gradients(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    width = key.shape[-1] + value.shape[-1]
    return key.new_zeros((*key.shape[:-1], width), dtype=accumulation_dtype(key.dtype))


def gathered_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequence: ContextSequence
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute :func:`~nxdt_core.engine.context.exchange.ring_forward` by one all-gather."""
    layout = _layout(sequence, key)
    gathering = _PendingKeyValues(key, value, sequence.group)
    merged = MergedAttention(query, value, sequence.scale, sequence.softcap)
    for block in local_blocks(*layout):
        merged.add(block, key, value)
    keys, values = gathering.whole()
    for block in prefix_blocks(*layout):
        merged.add(block, keys, values)
    return merged.result(sequence.sinks)


def gathered_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    sequence: ContextSequence,
) -> Gradients:
    """Compute :func:`~nxdt_core.engine.context.exchange.ring_backward` by one all-gather and one reduce-scatter."""
    layout, group = _layout(sequence, key), sequence.group
    gathering = _PendingKeyValues(key, value, group)
    sums = AttentionGradients(grad, query, value, output, lse, sequence.scale, sequence.softcap)
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
    shards = [zigzag_shard(narrow, rank, group.size(), _SEQUENCE) for rank in range(group.size())]
    summed = reduce_scatter_along(torch.stack(shards), 0, group)[0]
    grad_key += summed[..., : key.shape[-1]]
    grad_value += summed[..., key.shape[-1] :]
    return sums.query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _layout(sequence: ContextSequence, key: torch.Tensor) -> tuple[int, int, int, DocumentChunks | None, int | None]:
    group = sequence.group
    return group.rank(), group.size(), key.shape[_SEQUENCE] // 2, sequence.documents, sequence.window


class _PendingKeyValues:
    """A running all-gather of keys and values."""

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
        keys, values = zigzag_unshard(self._all.unbind(0), _SEQUENCE).tensor_split((self._key_width,), -1)
        return keys, values
