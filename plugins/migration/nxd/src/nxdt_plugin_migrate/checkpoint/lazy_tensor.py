"""Tensors that are not in memory yet: what is known of one, how to get it, and how to make others of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from nxdt_core.errors.base import NxdtError
from nxdt_plugin_migrate.errors import NeuronxMisfit

__all__ = ["Leaf", "concatenated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One tensor, or a part of one."""

    name: str
    where: str
    """The file or directory that it comes from, for messages."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    """The tensor, possibly a view of a mapped file."""
    stored: bool = True
    """False where the checkpoint refers to a tensor that it does not hold."""

    def rows(self, start: int, count: int, name: str) -> Leaf:
        """``count`` rows from ``start`` on, as a leaf of another name."""
        read = self.read
        return replace(self, name=name, shape=(count, *self.shape[1:]), read=lambda: read()[start : start + count])

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...] | None = None) -> Leaf:
        """Return what ``change`` makes of it, which has ``shape`` where that differs."""
        read = self.read
        return replace(self, shape=self.shape if shape is None else shape, read=lambda: change(read()))

    def misfit(self, reason: str) -> NxdtError:
        """Return the error that it cannot be merged."""
        return NeuronxMisfit(tensor=self.name, path=self.where, reason=reason)


def concatenated(parts: Sequence[Leaf], dimension: int, name: str | None = None) -> Leaf:
    """Return the parts, one after the other along ``dimension``.

    Raises:
        NeuronxMisfit: they differ in another dimension or in dtype.
    """
    first = parts[0]

    def others(part: Leaf) -> tuple[object, ...]:
        return part.dtype, len(part.shape), part.shape[:dimension], part.shape[dimension + 1 :]

    if len(first.shape) <= dimension or any(others(part) != others(first) for part in parts):
        shapes = ", ".join(f"{part.shape} {str(part.dtype).removeprefix('torch.')}" for part in parts)
        raise first.misfit(f"its parts are {shapes}")
    shape = list(first.shape)
    shape[dimension] = sum(part.shape[dimension] for part in parts)
    reads = [part.read for part in parts]
    return replace(
        first,
        name=name or first.name,
        shape=tuple(shape),
        read=lambda: torch.cat([read() for read in reads], dimension),
        stored=all(part.stored for part in parts),
    )
