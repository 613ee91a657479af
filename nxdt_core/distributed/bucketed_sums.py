"""Sums of many tensors over the ranks of a group, in few calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

__all__ = ["BUCKET_BYTES", "by_dtype", "copy_out", "sum_over"]

BUCKET_BYTES = 128 * 2**20
"""Gradients that are reduced in one call; larger calls gain nothing and need a buffer of their size."""


def sum_over(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Add up ``tensors`` over the ranks of ``group``, in place, many in one call."""
    for bucket in _buckets(tensors):
        _sum_bucket(group, bucket)


def by_dtype(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors that have elements, grouped by dtype."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def copy_out(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the elements of ``flat`` [sum of numel] into the tensors, one after the other."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])


def _sum_bucket(group: dist.ProcessGroup, bucket: list[torch.Tensor]) -> None:
    """Sum one bucket in a separate function, which frees its flat copy before the next bucket's copy is made."""
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    dist.all_reduce(flat, group=group)
    copy_out(flat, bucket)


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    for same in by_dtype(tensors):
        bucket: list[torch.Tensor] = []
        filled = 0
        for tensor in same:
            if bucket and filled + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, filled = [], 0
            bucket.append(tensor)
            filled += tensor.nbytes
        yield bucket
