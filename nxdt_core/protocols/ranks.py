"""Agreement between the processes of a run, which an engine offers as ``ranks``."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

__all__ = ["RankAgreement"]

_T = TypeVar("_T")


class RankAgreement:
    """The processes of a run, as hosts that agree: flags, names, decisions; no tensors, and no device waits.

    Every method is collective: all ranks call it, in the same order. The defaults are those of a run of one process:
    each method gives back what it is given.
    """

    rank: int = 0
    """Number of this process, from 0 to ``world_size`` - 1."""
    world_size: int = 1
    """Number of processes of the run."""
    host: str
    """Name of this process's machine."""

    def __init__(self) -> None:
        self.host = socket.gethostname()

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def broadcast_object(self, value: _T, source: int = 0) -> _T:
        """Return the value of rank ``source`` on every rank."""
        return value

    def all_gather_object(self, value: _T) -> list[_T]:
        """Return the values of all ranks in their order, on every rank."""
        return [value]

    def on_rank_zero(self, function: Callable[[], _T]) -> _T:
        """Return what ``function`` returns on rank 0, where alone it is called; its ``NxdtError`` is raised on every
        rank."""
        return function()

    def any_rank(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on any rank."""
        return flag

    def largest_before(self, value: int, *, topic: str = "") -> int:
        """Submit this step's ``value`` and return the largest of the step before, without waiting for the others.

        Alone, the answer is ``value`` itself. Different topics are independent of each other.
        """
        return value

    def last_answer(self, *, topic: str = "") -> int:
        """Take the answer that :meth:`largest_before` still owes, so that no communication stays pending."""
        return 0

    def sibling(self, *, timeout_s: float) -> RankAgreement:
        """Return the same processes over a separate connection, for a thread that communicates in parallel with this
        one.

        Args:
            timeout_s: longest wait within one of its methods.
        """
        return self
