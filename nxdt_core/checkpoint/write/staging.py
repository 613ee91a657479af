"""Copies of a rank's pieces on the host, for a save that runs while training changes the tensors.

The memory is kept from save to save. (torch's ``StateDictStager`` copies the whole storage behind a tensor, so a rank
would copy what others write, and finds its buffers by the identity of storages, which optimizer state does not keep.)
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TypeVar

import torch

from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.protocols.piece import Piece

__all__ = ["StagingBuffers"]

_Key = TypeVar("_Key")

_SLAB_BYTES = 256 * 2**20
"""Memory is taken in slabs of this size (a larger tensor apart): torch rounds pinned memory up to a power of two."""
_ALIGNMENT = 64


class StagingBuffers:
    """Memory on the host that pieces are copied to. One copy of everything that is staged, and no more."""

    def __init__(self) -> None:
        self._buffers: dict[object, torch.Tensor] = {}

    @torch.no_grad()
    def stage(self, pieces: Mapping[_Key, Piece]) -> dict[_Key, Piece]:
        """Return the pieces with their present elements, copied to the host; returns when the copies are made.

        What the last call returned is overwritten. Memory is allocated again only where keys, shapes or dtypes differ
        from those of the last call.
        """
        if not self._fit(pieces):
            self._buffers = {}  # freed before more is taken
            self._buffers = _allocate(pieces)
        for key, piece in pieces.items():
            if profile_of(piece.tensor.device).lazy:
                self._buffers[key].copy_(piece.tensor.to(HOST))  # functional tensors cannot be copied in place
            else:
                self._buffers[key].copy_(piece.tensor, non_blocking=True)
        for device in {piece.tensor.device for piece in pieces.values()}:
            if not profile_of(device).lazy:
                profile_of(device).operations.synchronize(device)
        return {key: Piece(self._buffers[key], piece.shape, piece.box) for key, piece in pieces.items()}

    def _fit(self, pieces: Mapping[_Key, Piece]) -> bool:
        return self._buffers.keys() == pieces.keys() and all(
            self._buffers[key].shape == piece.tensor.shape and self._buffers[key].dtype == piece.tensor.dtype
            for key, piece in pieces.items()
        )


def _allocate(pieces: Mapping[_Key, Piece]) -> dict[object, torch.Tensor]:
    """A contiguous tensor on the host for each piece."""
    pinned = any(profile_of(piece.tensor.device).pinned_host_memory for piece in pieces.values())
    buffers: dict[object, torch.Tensor] = {}
    for keys in _slabs({key: _aligned(piece.tensor.nbytes) for key, piece in pieces.items()}):
        size = sum(_aligned(pieces[key].tensor.nbytes) for key in keys)
        slab = torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else _host_memory(size)
        start = 0
        for key in keys:
            like = pieces[key].tensor
            buffers[key] = slab[start : start + like.nbytes].view(like.dtype).view(like.shape)
            start += _aligned(like.nbytes)
    return buffers


def _host_memory(size_bytes: int) -> torch.Tensor:
    """Bytes in huge pages where the system has them: the first copy is then four times as fast."""
    if not size_bytes or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size_bytes, dtype=torch.uint8, device=HOST)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _slabs(sizes: Mapping[_Key, int]) -> Iterable[list[_Key]]:
    """The keys in groups that share a slab."""
    group: list[_Key] = []
    filled = 0
    for key, size in sizes.items():
        if group and filled + size > _SLAB_BYTES:
            yield group
            group, filled = [], 0
        group.append(key)
        filled += size
    if group:
        yield group


def _aligned(size_bytes: int) -> int:
    return math.ceil(size_bytes / _ALIGNMENT) * _ALIGNMENT
