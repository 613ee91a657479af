"""Which rank hangs, as the heartbeats of all ranks show it.

A rank is *silent* when it sends no heartbeats: its process is stopped, or something in it holds Python's global lock.
A run is *stuck* when all ranks send heartbeats and none makes progress. Progress is a piece of work done, a collective
begun or done, or CPU time that a rank uses while it does not wait for others: compiling, or reading data. A rank that
is busy without an end is found by the others, which wait for it in a collective for three times as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from nxdt_core.launch.supervision.messages import Beat

__all__ = ["BUSY_FACTOR", "Hang", "HangWatch"]

BUSY_FACTOR = 3
"""How many times the limit a rank may wait for one that is busy."""

_BUSY = 0.05
"""Share of one core from which a rank counts as busy; threads that only poll use less than a hundredth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A run in which nothing happens any more."""

    kind: Literal["silent", "stuck"]
    ranks: tuple[Beat, ...]
    """The newest heartbeats of the ranks that hang, in the order of ranks."""
    waiting: tuple[Beat, ...]
    """Those of ranks that wait for others in a collective."""
    seconds: float
    """Seconds for which they have been silent."""


@dataclass(slots=True)
class _Seen:
    """What is known of one rank."""

    beat: Beat
    received_at: float
    moved_at: float


class HangWatch:
    """Keeps the newest heartbeat of each rank. Times are seconds of any clock that does not jump."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def record(self, beat: Beat, now: float) -> None:
        """Record a heartbeat that came at ``now``."""
        seen = self._seen.get(beat.rank)
        if seen is None:
            self._seen[beat.rank] = _Seen(beat, now, now)
            return
        if _moved(seen.beat, beat, now - seen.received_at):
            seen.moved_at = now
        seen.beat, seen.received_at = beat, now

    def forget(self, rank: int) -> None:
        """Watch this rank no longer: it has finished or ended."""
        self._seen.pop(rank, None)

    def excuse(self, now: float) -> None:
        """Reset the clock of every rank: this process was stopped and received nothing."""
        for seen in self._seen.values():
            seen.received_at = seen.moved_at = now

    def check(self, now: float) -> Hang | None:
        """Return what hangs, or None while nothing does."""
        if not self._seen:
            return None
        limit_s = max(seen.beat.limit_s for seen in self._seen.values())
        silent = [seen for seen in self._seen.values() if now - seen.received_at >= limit_s]
        if silent:
            return self._hang("silent", silent, now - max(seen.received_at for seen in silent))
        idle_s = now - max(seen.moved_at for seen in self._seen.values())
        longest_s = max((now - seen.moved_at for seen in self._seen.values() if seen.beat.waiting), default=0.0)
        if idle_s < limit_s and longest_s < BUSY_FACTOR * limit_s:
            return None
        absent = [seen for seen in self._seen.values() if not seen.beat.waiting]
        return self._hang("stuck", absent or self._behind(), max(idle_s, longest_s))

    def _behind(self) -> list[_Seen]:
        """The ranks that have begun the fewest collectives, where all wait."""
        fewest = min(seen.beat.begun for seen in self._seen.values())
        return [seen for seen in self._seen.values() if seen.beat.begun == fewest]

    def _hang(self, kind: Literal["silent", "stuck"], found: Iterable[_Seen], seconds: float) -> Hang:
        ranks = _in_order(found)
        waiting = [seen for seen in self._seen.values() if seen.beat.waiting and seen.beat not in ranks]
        return Hang(kind=kind, ranks=ranks, waiting=_in_order(waiting), seconds=seconds)


def _moved(before: Beat, after: Beat, seconds: float) -> bool:
    if (before.count, before.begun, before.done) != (after.count, after.begun, after.done):
        return True
    return not after.waiting and after.cpu_s - before.cpu_s > _BUSY * seconds


def _in_order(found: Iterable[_Seen]) -> tuple[Beat, ...]:
    return tuple(sorted((seen.beat for seen in found), key=lambda beat: beat.rank))
