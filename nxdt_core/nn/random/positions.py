"""Positions of a block's elements in the whole parameter, for random numbers by position."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nxdt_core.devices import profile_of

__all__ = ["Rows", "positions", "rows_of"]

_CHUNK_ELEMENTS_IN_CACHE = 1 << 16
"""Elements that are worked on at a time: half a MiB an operand, which stays in a core's cache."""
_CHUNK_ELEMENTS = 1 << 24
"""Elsewhere, where each chunk costs some launches: 128 MiB an operand."""


def positions(
    shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int], *, device: torch.device | str
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield, for each chunk of a block's elements, row by row, its place in the block and its elements' numbers in the
    whole parameter, row-major (int64).

    Args:
        shape: of the whole parameter.
        starts: where the block starts, one number a dimension.
        sizes: of the block.
        device: of the numbers.
    """
    shape, starts, sizes = _merged(tuple(shape), tuple(starts), tuple(sizes))
    count = math.prod(sizes)
    in_cache = profile_of(torch.device(device)).cache_bound_kernels
    chunk = _CHUNK_ELEMENTS_IN_CACHE if in_cache else _CHUNK_ELEMENTS
    for first in range(0, count, chunk):
        last = min(first + chunk, count)
        local = torch.arange(first, last, dtype=torch.int64, device=device)
        whole = torch.zeros_like(local)
        stride = 1
        for extent, start, size in zip(reversed(shape[1:]), reversed(starts[1:]), reversed(sizes[1:]), strict=True):
            whole += (local % size + start) * stride
            local = local.div_(size, rounding_mode="floor")
            stride *= extent
        yield slice(first, last), whole.add_(local.add_(starts[0]), alpha=stride)


@dataclass(frozen=True, slots=True)
class Rows:
    """Equally long runs of elements that follow each other in a block and in the whole parameter."""

    first: int
    """Number of the first row's first element in the whole parameter, row-major."""
    count: int
    columns: int
    """Elements of a row."""
    gap: int
    """Elements of the whole parameter between a row's last element and the next row's first."""

    def pieces(self, limit: int) -> Iterator[Rows]:
        """Yield these rows in their order, at most ``limit`` elements at a time: whole rows, or a part of one."""
        height, width = max(1, limit // self.columns), min(limit, self.columns)
        for row in range(0, self.count, height):
            for column in range(0, self.columns, width):
                first = self.first + row * (self.columns + self.gap) + column
                yield Rows(first, min(height, self.count - row), min(width, self.columns - column), self.gap)


def rows_of(shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int]) -> list[Rows]:
    """Return the rows of a block, equally many in each item. Arguments as for :func:`positions`.

    One item, and in it one row where the block has no gaps, but for a block that is cut along three dimensions or more.
    """
    shape, starts, sizes = _merged(tuple(shape), tuple(starts), tuple(sizes))
    if len(shape) == 1:
        return [Rows(starts[0], 1, sizes[0], 0)]
    *outer, count, columns = sizes
    whole = math.prod(shape[-2:])
    first = starts[-2] * shape[-1] + starts[-1]
    numbers = [0]
    for extent, start, size in zip(shape[:-2], starts, outer, strict=False):
        numbers = [number * extent + start + along for number in numbers for along in range(size)]
    return [Rows(number * whole + first, count, columns, shape[-1] - columns) for number in numbers]


def _merged(
    shape: tuple[int, ...], starts: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The same block with dimensions that are taken whole merged into the one before: mostly one or two remain, and
    each costs a division an element."""
    merged = [(1, 0, 1)]
    for extent, start, size in zip(shape, starts, sizes, strict=True):
        if (start, size) == (0, extent):
            extent_before, start_before, size_before = merged[-1]
            merged[-1] = (extent_before * extent, start_before * extent, size_before * size)
        elif merged[-1] == (1, 0, 1):
            merged[-1] = (extent, start, size)
        else:
            merged.append((extent, start, size))
    extents, first, counts = zip(*merged, strict=True)
    return tuple(extents), tuple(first), tuple(counts)
