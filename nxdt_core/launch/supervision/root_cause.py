"""The choice of the root cause among the failures of many ranks, with its text and exit status."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Literal

from nxdt_core.errors.ranks import RankDied, RankHung
from nxdt_core.launch.supervision.messages import Beat, Failure

BUSY_FACTOR = 3
"""Multiple of the limit for which a rank may wait for one that is busy."""

_BUSY = 0.05
"""Share of one core from which a rank counts as busy; threads that only poll use less than a hundredth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A run in which nothing happens any more."""

    kind: Literal["silent", "stuck"]
    ranks: tuple[Beat, ...]
    """The newest heartbeats of the ranks that hang, in the order of ranks."""
    waiting: tuple[Beat, ...]
    """Heartbeats of the ranks that wait for others in a collective."""
    seconds: float
    """Seconds for which they have been silent."""


@dataclass(slots=True)
class _Seen:
    """The newest heartbeat of one rank, with the times at which it came and at which the rank last moved."""

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
        before, counters = seen.beat, (beat.count, beat.begun, beat.done)
        computes = not beat.waiting and beat.cpu_s - before.cpu_s > _BUSY * (now - seen.received_at)
        if computes or (before.count, before.begun, before.done) != counters:
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
        in_order = [self._seen[rank] for rank in sorted(self._seen)]
        limit_s = max(seen.beat.limit_s for seen in in_order)
        silent = [seen for seen in in_order if now - seen.received_at >= limit_s]
        kind: Literal["silent", "stuck"]
        if silent:
            kind, hanging, seconds = "silent", silent, now - max(seen.received_at for seen in silent)
        else:
            idle_s = now - max(seen.moved_at for seen in in_order)
            longest_s = max((now - seen.moved_at for seen in in_order if seen.beat.waiting), default=0.0)
            if idle_s < limit_s and longest_s < BUSY_FACTOR * limit_s:
                return None
            kind, seconds = "stuck", max(idle_s, longest_s)
            hanging = [seen for seen in in_order if not seen.beat.waiting]
            if not hanging:  # all wait: those that have begun the fewest collectives
                fewest = min(seen.beat.begun for seen in in_order)
                hanging = [seen for seen in in_order if seen.beat.begun == fewest]
        ranks = tuple(seen.beat for seen in hanging)
        waiting = tuple(seen.beat for seen in in_order if seen.beat.waiting and seen.beat not in ranks)
        return Hang(kind=kind, ranks=ranks, waiting=waiting, seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """The reported failure of a run."""

    status: int
    text: str
    """Text to print, once, for all ranks."""
    cause: str
    """Cause of the failure in a few words: who failed."""
    dead: Failure | None = None
    """The rank that died without a report, if one did."""


INTERRUPTION = RootCause(status=128 + signal.SIGINT, text="Interrupted.", cause="it was interrupted")
"""A run that was stopped at once; the status is that of shells."""


def decide(failures: Sequence[Failure], world_size: int) -> RootCause:
    """Judge the failures of about one second, in the order in which they arrived.

    A rank that died is the cause, even if others came first: its connections close with it, and what those
    report is that. Otherwise the first has the word; a mistake that all ranks made needs no rank's name.
    """
    dead = next((failure for failure in failures if failure.kind == "death"), None)
    if dead is not None:
        death = RankDied(rank=dead.rank, host=dead.host)
        return RootCause(
            status=death.exit_status, text=str(death), cause=f"rank {dead.rank} on {dead.host} died", dead=dead
        )
    first = failures[0]
    if first.kind == "interrupt":
        return replace(INTERRUPTION, status=first.status)
    alike = sum(failure.text == first.text for failure in failures)
    cause = f"rank {first.rank} on {first.host} failed"
    if first.kind == "mistake" and alike == world_size:
        return RootCause(status=first.status, text=first.text, cause="all ranks failed in the same way")
    more = f" (and {alike - 1} more like it)" if alike > 1 else ""
    head = f"Rank {first.rank} on {first.host} failed{more}:"
    return RootCause(status=first.status, text=f"{head}\n{first.text.rstrip()}", cause=cause)


def hung(hang: Hang, stopped: AbstractSet[int], stacks: Mapping[int, str]) -> RootCause:
    """Describe a run that hangs.

    Args:
        hang: what the heartbeats show.
        stopped: ranks whose process was found stopped.
        stacks: the directory where each rank has written its stacks; empty for a rank that could not.
    """
    last_seen = []
    for beat in hang.ranks:
        process = f"process {beat.pid}" + (" was stopped by a signal" if beat.rank in stopped else "")
        last = f", last collective: {beat.last}" if beat.last else ""
        heartbeat = f"last heartbeat: step {beat.step}, {beat.phase}{last}"
        last_seen.append(f"rank {beat.rank} on {beat.host} ({process}; {heartbeat})")
    error = RankHung(
        kind=hang.kind,
        seconds=hang.seconds,
        ranks=tuple(last_seen),
        waits=tuple(f"rank {beat.rank} in {beat.last or 'a collective'}" for beat in hang.waiting),
        stacks=next(filter(None, stacks.values()), ""),
    )
    names = ", ".join(f"rank {beat.rank} on {beat.host}" for beat in hang.ranks[:1])
    return RootCause(status=error.exit_status, text=str(error), cause=f"{names} made no progress")
