"""Numbers of the device that the host must know, such as how many rows go to each rank.

Each read makes the host wait for the device. What is computed again in backward therefore reads nothing again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from nxdt_core.distributed.devices import HOST


class HostValues:
    """Values that a forward reads from the device, kept for the second time that it is computed."""

    def __init__(self) -> None:
        self._values: list[list[int]] = []

    def recorded(self) -> AbstractContextManager[None]:
        """Return the context of the first computation."""
        return _Reads(self._values, repeats=False)

    def repeated(self) -> AbstractContextManager[None]:
        """Return the context of the second computation, which may be entered again."""
        return _Reads(self._values, repeats=True)


class _Reads(AbstractContextManager[None]):
    """A computation that keeps what it reads, or reads what the first one kept."""

    def __init__(self, values: list[list[int]], *, repeats: bool) -> None:
        self.values, self.repeats = values, repeats
        self.remaining: Iterator[list[int]] = iter(())

    def __enter__(self) -> None:
        if not self.repeats:
            self.values.clear()
        self.remaining = iter(self.values)
        _BLOCKS.append(self)

    def __exit__(self, *_: object) -> None:
        _BLOCKS.remove(self)


_BLOCKS: list[_Reads] = []
"""Entered contexts of the process, not of a thread: autograd recomputes in its own threads."""


def host_values(tensor: torch.Tensor) -> list[int]:
    """Return the elements of ``tensor`` int [n]. The host waits once, for one copy of all: a graph would otherwise wait
    for each."""
    if torch.compiler.is_compiling():  # a graph keeps them by itself
        read: list[int] = tensor.to(HOST).tolist()
        return read
    inner = next((block for block in reversed(_BLOCKS) if block.repeats), None)
    values = None if inner is None else next(inner.remaining, None)  # the first computation may have read less
    if values is None:
        values = tensor.to(HOST).tolist()
    for block in _BLOCKS:
        if not block.repeats:
            block.values.append(values)
    return values
