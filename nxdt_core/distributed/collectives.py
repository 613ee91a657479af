"""Collectives that autograd sees: each takes a local tensor and a process group, and knows its own transpose.

A group that is None stands for a mesh dimension of size 1: the tensor comes back as it is. Graphs have functional
collectives, which passes of inductor know. Torch 2.11 sends gradients to the wrong place where an autograd function in
a graph returns what it has changed in place (its issue 180642), as plain ``torch.distributed`` calls do. AOTAutograd,
through which all our backends differentiate, changes nothing in place when it waits for a functional one.

:func:`all_reduce_bucketed` sums many tensors in few calls; autograd does not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nxdt_core.distributed.buckets import buckets
from nxdt_core.distributed.devices import profile_of
from nxdt_core.distributed.torch_versions import (
    all_gather_single,
    begin_all_to_all,
    ended,
    reduce_scatter_single,
    traced,
)
from nxdt_core.protocols.optimizer import ParameterShard
from nxdt_core.protocols.tensor_shards import TensorSlice

__all__ = [
    "BUCKET_BYTES",
    "PendingGather",
    "all_reduce_bucketed",
    "all_to_all",
    "all_to_all_rows",
    "begin_reduce_scatter",
    "copy_from_flat",
    "copy_to_group",
    "gather_along",
    "gather_shard",
    "gather_whole",
    "group_by_dtype",
    "overlap_all_to_all",
    "reduce_from_group",
    "reduce_scatter_along",
    "reduce_scatter_into",
]


_Collective = Callable[[torch.Tensor, int, dist.ProcessGroup], torch.Tensor]
"""Takes a tensor, the dimension along which it is gathered or scattered, and a group."""
BUCKET_BYTES = 128 * 2**20
"""Gradients that are reduced in one call; larger calls gain nothing and need a buffer of their size."""


def copy_to_group(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return ``tensor``, equal on all ranks, for computations that differ by rank: their gradients are summed."""
    return _apply(tensor, _same, _summed, 0, group)


def reduce_from_group(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the sum of all ranks' ``tensor``; each rank's gradient is that of the sum, which is equal on all ranks."""
    return _apply(tensor, _summed, _same, 0, group)


def gather_along(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return all ranks' ``tensor`` concatenated along ``dim``; gradients are summed over the ranks and scattered
    back."""
    return _apply(tensor, _gathered, _scattered_sum, dim, group)


def gather_whole(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return all ranks' ``tensor`` concatenated along ``dim``, for computations that are equal on all ranks: each
    rank's gradient is its own part of that of the whole."""
    return _apply(tensor, _gathered, _own_part, dim, group)


@torch.no_grad()
def gather_shard(tensor: torch.Tensor, shard: ParameterShard) -> torch.Tensor:
    """Return the whole of what ``tensor`` is this rank's part of, on each rank that has a part. Collective.

    This rank's part of a whole is ``whole[shard.region.within(TensorSlice.whole(shard.shape))]``.

    Args:
        tensor: of the shape of the local parameter, such as its gradient.
        shard: of the parameter.
    """
    whole = tensor.new_zeros(shard.shape)
    whole[shard.region.within(TensorSlice.whole(shard.shape))] = shard.real(tensor)
    for group in shard.groups:
        dist.all_reduce(whole, group=group)
    return whole


def reduce_scatter_along(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return this rank's part along ``dim`` of the sum of all ranks' ``tensor``; gradients are gathered.

    Raises:
        ValueError: the group's size does not divide ``dim``.
    """
    return _apply(tensor, _scattered_sum, _gathered, dim, group)


def _apply(
    tensor: torch.Tensor, collective: _Collective, transpose: _Collective, dim: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    if group is None:
        return tensor
    return _Transposed.apply(tensor, collective, transpose, dim % max(1, tensor.ndim), group)  # type: ignore[no-untyped-call, no-any-return]


def all_to_all(
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group: dist.ProcessGroup | None,
    *,
    equal: bool = False,
) -> torch.Tensor:
    """Send rows to ranks and receive theirs; gradients travel back the same way.

    Args:
        tensor: [sum(input_splits), ...], the rows for rank 0 first.
        output_splits: rows that come from each rank.
        input_splits: rows that go to each rank.
        group: None for one rank.
        equal: whether every rank sends equally many rows to each. Where the device has no all-to-all, no size has to be
            asked for then.

    Returns:
        [sum(output_splits), ...], the rows of rank 0 first.
    """
    if group is None:
        return tensor
    received: torch.Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
        tensor, list(output_splits), list(input_splits), group, equal
    )
    return received


def overlap_all_to_all(
    compute: Callable[[int, torch.Tensor], torch.Tensor],
    parts: Sequence[torch.Tensor],
    splits: Sequence[tuple[Sequence[int], Sequence[int]]],
    group: dist.ProcessGroup,
) -> list[torch.Tensor]:
    """Send the rows of each part to ranks, compute with the rows that arrive, and send the results back.

    While one part is computed, the next one is on its way to the ranks, and the results of the preceding one are on
    their way back. Backward does the same from the last part to the first one: autograd runs the last call first, and
    each of the two halves of an exchange is a separate call.

    Args:
        compute: called with the number of a part and the rows that have arrived; it returns the same number of rows.
        parts: [rows of the part, ...]; all ranks have the same number of parts.
        splits: for each part, the rows that go to each rank and those that come from each.
        group: a process group of a device that has an all-to-all.

    Returns:
        The results of each part, in the order of its rows.
    """
    returning, following = [], _Exchange(parts[0], *splits[0], group)
    for number, (outgoing, incoming) in enumerate(splits):
        arriving = following
        if number + 1 < len(parts):
            following = _Exchange(parts[number + 1], *splits[number + 1], group)
        returning.append(_Exchange(compute(number, arriving.end()), incoming, outgoing, group))
    return [exchange.end() for exchange in returning]


class _Exchange:
    """Rows on their way. Their gradients begin to travel where backward passes :meth:`end`, and have arrived where it
    passes the beginning."""

    def __init__(
        self, tensor: torch.Tensor, outgoing: Sequence[int], incoming: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        self._splits = (list(outgoing), list(incoming))
        self._group = group
        self._sent = _Sent.apply(tensor)  # type: ignore[no-untyped-call]
        self._begun = begin_all_to_all(self._sent.detach().contiguous(), incoming, outgoing, group)

    def end(self) -> torch.Tensor:
        """Return what has arrived."""
        arrived: torch.Tensor = _Arrived.apply(  # type: ignore[no-untyped-call]
            self._sent, self._begun, *self._splits, self._group
        )
        return arrived


class PendingGather:
    """A gather of all ranks' tensors along a dimension that runs while other things are computed. Without gradients."""

    def __init__(self, tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> None:
        """Begin it."""
        self._part, self._dim, self._group = tensor.contiguous(), dim % tensor.ndim, group
        self._whole = _room_for_all(self._part, group)
        self._work = all_gather_single(self._whole, self._part, group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        """Return what :func:`gather_along` returns, as soon as it has arrived."""
        self._work.wait()
        return _along(self._whole, self._part.shape, self._dim, self._group)


class _Transposed(torch.autograd.Function):
    """A collective whose backward is another one, of the same dimension and group."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        collective: _Collective,
        transpose: _Collective,
        dim: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.transpose, ctx.dim, ctx.group = transpose, dim, group
        return collective(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return ctx.transpose(grad, ctx.dim, ctx.group), None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        group: dist.ProcessGroup,
        equal: bool,
    ) -> torch.Tensor:
        ctx.output_splits, ctx.input_splits, ctx.group, ctx.equal = output_splits, input_splits, group, equal
        return _exchanged(tensor, output_splits, input_splits, group, equal)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        received = _exchanged(grad, ctx.input_splits, ctx.output_splits, ctx.group, ctx.equal)
        return received, None, None, None, None


class _Sent(torch.autograd.Function):
    """Waits in backward for a gradient that is still being sent."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return ended(grad)


class _Arrived(torch.autograd.Function):
    """Waits for an all-to-all that has begun. ``sent`` is an argument for its gradient alone, which has that shape."""

    @staticmethod
    def forward(
        ctx: Any,
        sent: torch.Tensor,
        begun: torch.Tensor,
        outgoing: list[int],
        incoming: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.outgoing, ctx.incoming, ctx.group = outgoing, incoming, group
        return ended(begun)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return begin_all_to_all(grad.contiguous(), ctx.outgoing, ctx.incoming, ctx.group), None, None, None, None


def _same(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return tensor.view_as(tensor)


def _own_part(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    size = tensor.shape[dim] // group.size()
    return tensor.narrow(dim, group.rank() * size, size).contiguous()


def _summed(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """A copy, since neither an autograd function's input nor a gradient may be changed in place."""
    if torch.compiler.is_compiling():
        return traced("all_reduce", tensor.contiguous(), "sum", group=group)
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gathered(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    if torch.compiler.is_compiling():  # the form that inductor's pass for asynchronous tensor parallelism knows
        whole = traced("all_gather_into_tensor", tensor.contiguous(), group.size(), group=group)
        return torch.cat(whole.chunk(group.size()), dim) if dim else whole
    whole = _room_for_all(tensor, group)
    all_gather_single(whole, tensor.contiguous(), group=group)
    return _along(whole, tensor.shape, dim, group)


def _room_for_all(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))


def _along(whole: torch.Tensor, part: torch.Size, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Collectives concatenate on dimension 0; from there the ranks' parts move to ``dim``."""
    if dim == 0:
        return whole
    return whole.view(group.size(), *part).movedim(0, dim).flatten(dim, dim + 1)


def _scattered_sum(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    ranks = group.size()
    if tensor.shape[dim] % ranks:
        raise ValueError(f"dimension {dim} of {tuple(tensor.shape)} does not divide over {ranks} ranks")
    if torch.compiler.is_compiling():  # as of _gathered
        parts = torch.cat(tensor.chunk(ranks, dim)) if dim else tensor.contiguous()
        return traced("reduce_scatter_tensor", parts, "sum", ranks, group=group)
    split = (*tensor.shape[:dim], ranks, -1, *tensor.shape[dim + 1 :])
    parts = tensor if dim == 0 else tensor.reshape(split).movedim(dim, 0).flatten(0, 1)
    part = tensor.new_empty((parts.shape[0] // ranks, *parts.shape[1:]))
    reduce_scatter_into(part, parts.contiguous(), group)
    return part


def reduce_scatter_into(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Set ``part`` to this rank's part of the sum of the ranks' tensors. Without gradients.

    Args:
        part: [n, ...], which is written.
        whole: [ranks * n, ...], contiguous.
        group: ranks whose tensors are summed.
    """
    if profile_of(whole.device).sums_by_exchange and not torch.compiler.is_compiling():
        begin_reduce_scatter(part, whole, group)()
    else:
        reduce_scatter_single(part, whole, group=group)


def begin_reduce_scatter(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], None]:
    """Begin :func:`reduce_scatter_into` by an exchange, and return what waits for it and writes ``part``."""
    parts = torch.empty_like(whole)
    work = dist.all_to_all_single(parts, whole, group=group, async_op=True)

    def end() -> None:
        work.wait()
        torch.sum(parts.view(group.size(), *part.shape), 0, out=part)

    return end


def all_to_all_rows(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return row i of each rank on rank i, in the order of the ranks; ``tensor`` [ranks, ...]. Without gradients."""
    if profile_of(tensor.device).all_to_all:
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor, group=group)
        return received
    return _exchanged_by_gathers(tensor, [1] * group.size(), [1] * group.size(), group, equal=True)


def _exchanged(
    tensor: torch.Tensor, output_splits: list[int], input_splits: list[int], group: dist.ProcessGroup, equal: bool
) -> torch.Tensor:
    if not profile_of(tensor.device).all_to_all:
        return _exchanged_by_gathers(tensor, output_splits, input_splits, group, equal=equal)
    if torch.compiler.is_compiling():
        return ended(begin_all_to_all(tensor.contiguous(), output_splits, input_splits, group))
    received = tensor.new_empty((sum(output_splits), *tensor.shape[1:]))
    dist.all_to_all_single(received, tensor.contiguous(), output_splits, input_splits, group=group)
    return received


def _exchanged_by_gathers(
    tensor: torch.Tensor,
    output_splits: list[int],
    input_splits: list[int],
    group: dist.ProcessGroup,
    *,
    equal: bool,
) -> torch.Tensor:
    """Exchange as :func:`_exchanged` for groups without an all-to-all: every rank gets all rows and keeps its own."""
    ranks, this_rank = group.size(), group.rank()
    if equal:
        whole = _gathered(tensor, 0, group).view(ranks, ranks, input_splits[0], *tensor.shape[1:])
        return whole[:, this_rank].flatten(0, 1).contiguous()
    splits = _gathered(torch.tensor([input_splits], device=tensor.device), 0, group).tolist()
    padded = tensor.new_zeros((max(map(sum, splits)), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    whole = _gathered(padded, 0, group).view(ranks, *padded.shape)
    starts = [sum(sent[:this_rank]) for sent in splits]
    return torch.cat([whole[rank, start : start + output_splits[rank]] for rank, start in enumerate(starts)])


def all_reduce_bucketed(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Add up ``tensors`` over the ranks of ``group``, in place, many in one call."""
    for same in group_by_dtype(tensors):
        for bucket in buckets(same, lambda tensor: tensor.nbytes, BUCKET_BYTES):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat, group=group)
            copy_from_flat(flat, bucket)
            del flat  # before the next bucket's copy is made


def group_by_dtype(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors that have elements, grouped by dtype."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def copy_from_flat(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the elements of ``flat`` [sum of numel] into the tensors, one after the other."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])
