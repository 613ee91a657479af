"""How the processes of a run agree on decisions; what an engine offers as ``ranks``."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol, TypeVar, final

__all__ = ["OneRank", "RankAgreement"]

_T = TypeVar("_T")


class RankAgreement(Protocol):
    """The processes of a run, as hosts that agree: flags, names, decisions; no tensors, and no device waits.

    Every method is collective: all ranks call it, in the same order. Alone, each gives back what it is given.
    """

    @property
    def rank(self) -> int:
        """Return the number of this process, from 0 to ``world_size`` - 1."""
        ...

    @property
    def world_size(self) -> int:
        """Return the number of processes of the run."""
        ...

    @property
    def host(self) -> str:
        """Name of this process's machine."""
        ...

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        ...

    def broadcast_object(self, value: _T, source: int = 0) -> _T:
        """Return the value of rank ``source`` on every rank."""
        ...

    def all_gather_object(self, value: _T) -> list[_T]:
        """Return the values of all ranks in their order, on every rank."""
        ...

    def on_rank_zero(self, function: Callable[[], _T]) -> _T:
        """Return what ``function`` returns on rank 0, where alone it is called; its ``NxdtError`` is raised on every
        rank."""
        ...

    def any_rank(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on any rank."""
        ...

    def largest_before(self, value: int, *, topic: str = "") -> int:
        """Submit this step's ``value`` and return the largest of the step before, without waiting for the others.

        Alone, the answer is ``value`` itself. Different topics are independent of each other.
        """
        ...

    def last_answer(self, *, topic: str = "") -> int:
        """Take the answer that :meth:`largest_before` still owes, so that no communication stays pending."""
        ...

    def sibling(self, *, timeout_s: float) -> RankAgreement:
        """Return the same processes over a separate connection, for a thread that communicates in parallel with this
        one.

        Args:
            timeout_s: longest wait within one of its methods.
        """
        ...


@final
class OneRank:
    """The :class:`RankAgreement` of a run of one process, for engines that have no others."""

    rank = 0
    world_size = 1

    @property
    def host(self) -> str:
        """Name of this machine."""
        return socket.gethostname()

    def barrier(self) -> None:
        """Return at once."""

    def broadcast_object(self, value: _T, source: int = 0) -> _T:
        """Return ``value``."""
        del source
        return value

    def all_gather_object(self, value: _T) -> list[_T]:
        """Return ``value`` as the only one."""
        return [value]

    def on_rank_zero(self, function: Callable[[], _T]) -> _T:
        """Return what ``function`` returns."""
        return function()

    def any_rank(self, flag: bool) -> bool:
        """Return ``flag``."""
        return flag

    def largest_before(self, value: int, *, topic: str = "") -> int:
        """Return ``value``."""
        del topic
        return value

    def last_answer(self, *, topic: str = "") -> int:
        """Return 0: no answer is owed."""
        del topic
        return 0

    def sibling(self, *, timeout_s: float) -> OneRank:
        """Return another one."""
        del timeout_s
        return OneRank()
