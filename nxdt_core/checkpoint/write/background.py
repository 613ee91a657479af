"""A save that runs while training changes the tensors: copies on the host, and a thread with a deadline.

The memory of the copies is kept from save to save. (torch's ``StateDictStager`` copies the whole storage behind a
tensor, so a rank would copy what others write. It finds its buffers by the identity of storages, which optimizer state
does not keep.)
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Generic, Literal, TypeVar

import torch

from nxdt_core.distributed.buckets import buckets
from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.errors import NxdtError
from nxdt_core.errors.checkpoints import SaveTookTooLong, StorageError
from nxdt_core.protocols.piece import Piece

_NICENESS = 15
"""Niceness of the thread and of those that it starts: on a host that computes, a save uses the cores that training
leaves free. On two cores the next ten steps take 1.2 times as long as those before, and 1.4 times without it."""

T = TypeVar("T")


class BackgroundJob(Generic[T]):
    """Runs ``work`` at once, in parallel with the caller.

    The thread does not keep the process alive: a store that hangs cannot be interrupted, only left behind.

    Args:
        work: called with this job.
        where: what ``work`` is about, for messages.
        deadline_s: how long it may take.
        yields: give other threads of this process the cores first, for a caller that computes meanwhile.
    """

    def __init__(
        self, work: Callable[[BackgroundJob[T]], T], *, where: str, deadline_s: float, yields: bool = True
    ) -> None:
        self._where = where
        self._deadline_s = deadline_s
        self._yields = yields
        self._ends_at = time.monotonic() + deadline_s
        self._value: T | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"save {where}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> Literal["running", "done", "failed"]:
        """Return its state; work that runs beyond its deadline has failed."""
        if self._ended.is_set():
            return "done" if self._error is None else "failed"
        return "running" if time.monotonic() < self._ends_at else "failed"

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, at most until its deadline."""
        left_s = max(0.0, self._ends_at - time.monotonic())
        self._ended.wait(left_s if timeout_s is None else min(timeout_s, left_s))

    def give_up(self) -> None:
        """Mark it as late, regardless of the time left: another rank's time is over."""
        self._ends_at = min(self._ends_at, time.monotonic())

    def check_deadline(self) -> None:
        """Called by ``work``, too, before what may not happen late.

        Raises:
            SaveTookTooLong: the deadline is over.
        """
        late = self._too_late()
        if late is not None:
            raise late

    def raise_failure(self) -> None:
        """Raise why it failed; nothing where it runs or is done. Does not wait.

        Raises:
            SaveTookTooLong: it runs beyond its deadline.
        """
        if self._ended.is_set():
            if self._error is not None:
                raise self._error
        else:
            self.check_deadline()

    def result(self) -> T:
        """Return what ``work`` returned; for a job that is done."""
        assert self.state == "done", "a job has a result once it is done"
        return self._value  # type: ignore[return-value]

    def _run(self, work: Callable[[BackgroundJob[T]], T]) -> None:
        if self._yields:
            _yield_cores()
        try:
            self._value = work(self)
        except NxdtError as error:
            self._error = error
        except BaseException as error:  # raised by raise_failure
            self._error = self._too_late(error) or error
        finally:
            self._ended.set()

    def _too_late(self, cause: BaseException | None = None) -> StorageError | None:
        """The error of a job beyond its deadline; ``cause``: what a wait for another rank ended in by then."""
        if time.monotonic() <= self._ends_at:
            return None
        error = SaveTookTooLong(where=self._where, reason=f"it takes more than {self._deadline_s:g} s")
        error.__cause__ = cause
        return error


def _yield_cores() -> None:
    """Let other threads of this process go first. Only Linux has priorities of threads."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


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
    sizes = {key: _aligned(piece.tensor.nbytes) for key, piece in pieces.items()}
    for keys in buckets(sizes, sizes.__getitem__, _SLAB_BYTES):
        size = sum(sizes[key] for key in keys)
        slab = torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else _host_memory(size)
        start = 0
        for key in keys:
            like = pieces[key].tensor
            buffers[key] = slab[start : start + like.nbytes].view(like.dtype).view(like.shape)
            start += sizes[key]
    return buffers


def _host_memory(size_bytes: int) -> torch.Tensor:
    """Bytes in huge pages where the system has them: the first copy is then four times as fast."""
    if not size_bytes or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size_bytes, dtype=torch.uint8, device=HOST)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _aligned(size_bytes: int) -> int:
    return math.ceil(size_bytes / _ALIGNMENT) * _ALIGNMENT
