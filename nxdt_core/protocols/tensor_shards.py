"""Shards: the part of a tensor that one rank holds, and its place in the whole. No torch at import."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Listing", "LocalShard", "ShardInfo", "TensorKey", "TensorSlice"]


_SAMPLES = 8
"""Elements of each parameter that a digest sees. Training changes nearly all; a digest of all of a large model would
take minutes."""


TensorKey = tuple[str, str]
"""Section and name of a tensor."""


@dataclass(frozen=True, slots=True, order=True)
class TensorSlice:
    """``shape`` elements a dimension, the first of them at ``offsets`` of the whole tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> TensorSlice:
        """Return all of a tensor of ``shape``."""
        return cls((0,) * len(shape), shape)

    @property
    def elements(self) -> int:
        """Return the number of elements in the region."""
        return math.prod(self.shape)

    def samples(self, shape: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the elements that a digest sees of a tensor of ``shape``, evenly spaced in the whole, as far as they
        are in the region: their number among all, and their position in the region."""
        elements = math.prod(shape)
        for number in range(_SAMPLES):
            at, position = number * (elements - 1) // (_SAMPLES - 1), list[int]()
            for size in reversed(shape):
                at, index = divmod(at, size)
                position.insert(0, index)
            local = tuple(index - start for index, start in zip(position, self.offsets, strict=True))
            if all(0 <= index < size for index, size in zip(local, self.shape, strict=True)):
                yield number, local

    def intersection(self, other: TensorSlice) -> TensorSlice | None:
        """Return the intersection, or None where it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = (
            min(start + size, other_start + other_size)
            for start, size, other_start, other_size in zip(
                self.offsets, self.shape, other.offsets, other.shape, strict=True
            )
        )
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return TensorSlice(starts, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: TensorSlice) -> tuple[slice, ...]:
        """Return its position in a tensor that holds ``outer``, of which it is a part."""
        return tuple(
            slice(start - outer_start, start - outer_start + size)
            for start, size, outer_start in zip(self.offsets, self.shape, outer.offsets, strict=True)
        )


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The elements of one tensor on this rank."""

    tensor: torch.Tensor
    """Plain tensor; it shares its memory with the tensor that it is a shard of."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    region: TensorSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """Part of one tensor that one rank holds."""

    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    region: TensorSlice
    same_as: str | None = None
    """Name, in the same section, of the tensor that is the very same memory here."""


Listing = Mapping[TensorKey, ShardInfo]
"""Tensors that one rank, or one checkpoint, holds."""
