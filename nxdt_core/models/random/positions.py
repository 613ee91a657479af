"""Positions of a block's elements in the whole parameter, for random numbers by position."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Rows", "rows_of"]


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

    @property
    def elements(self) -> int:
        """Elements of all rows."""
        return self.count * self.columns

    def numbers(self, device: torch.device) -> torch.Tensor:
        """Return the elements' numbers in the whole parameter, int64 [elements]."""
        places = torch.arange(self.elements, dtype=torch.int64, device=device)
        return places + places.div(self.columns, rounding_mode="floor").mul_(self.gap).add_(self.first)

    def pieces(self, limit: int) -> Iterator[Rows]:
        """Yield these rows in their order, at most ``limit`` elements at a time: whole rows, or a part of one."""
        height, width = max(1, limit // self.columns), min(limit, self.columns)
        for row in range(0, self.count, height):
            for column in range(0, self.columns, width):
                first = self.first + row * (self.columns + self.gap) + column
                yield Rows(first, min(height, self.count - row), min(width, self.columns - column), self.gap)


def rows_of(shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int]) -> list[Rows]:
    """Return the rows of a block, equally many in each item.

    One item, and in it one row where the block has no gaps, but for a block that is cut along three dimensions or more.

    Args:
        shape: of the whole parameter.
        starts: where the block starts, one number per dimension.
        sizes: of the block.
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
