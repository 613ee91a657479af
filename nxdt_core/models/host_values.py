"""Numbers of the device that the host must know, such as how many rows go to each rank.

Each read makes the host wait for the device. What is computed again in backward therefore reads nothing again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from nxdt_core.distributed.devices import HOST

__all__ = ["HostValues", "host_values"]


class HostValues:
    """Values that a forward reads from the device, kept for the second time that it is computed."""

    def __init__(self) -> None:
        self._values: list[list[int]] = []

    def recorded(self) -> AbstractContextManager[None]:
        """Return the context of the first computation."""
        return _Recorded(self._values)

    def repeated(self) -> AbstractContextManager[None]:
        """Return the context of the second computation, which may be entered again."""
        return _Repeated(self._values)


def host_values(tensor: torch.Tensor) -> list[int]:
    """Return the elements of ``tensor`` int [n]. The host waits once, for one copy."""
    if torch.compiler.is_compiling():  # a graph keeps them by itself
        return _read(tensor)
    repeated = next((block.next() for block in reversed(_BLOCKS) if isinstance(block, _Repeated)), None)
    values = _read(tensor) if repeated is None else repeated
    for block in _BLOCKS:
        if isinstance(block, _Recorded):
            block.values.append(values)
    return values


def _read(tensor: torch.Tensor) -> list[int]:
    """Copy all elements, and then read them: a graph would otherwise wait for each."""
    values: list[int] = tensor.to(HOST).tolist()
    return values


class _Recorded(AbstractContextManager[None]):
    def __init__(self, values: list[list[int]]) -> None:
        self.values = values

    def __enter__(self) -> None:
        self.values.clear()
        _BLOCKS.append(self)

    def __exit__(self, *_: object) -> None:
        _BLOCKS.remove(self)


class _Repeated(AbstractContextManager[None]):
    def __init__(self, values: list[list[int]]) -> None:
        self._values, self._read = values, 0

    def __enter__(self) -> None:
        self._read = 0
        _BLOCKS.append(self)

    def __exit__(self, *_: object) -> None:
        _BLOCKS.remove(self)

    def next(self) -> list[int] | None:
        """Return what the first computation read at this place; None if it read nothing more."""
        self._read += 1
        return self._values[self._read - 1] if self._read <= len(self._values) else None


_BLOCKS: list[_Recorded | _Repeated] = []
"""Entered contexts of the process, not of a thread: autograd recomputes in its own threads."""
