"""Which of many ranks' failures is reported as the root cause, with which text and exit status."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from nxdt_core.errors.ranks import RankDied, RankHung
from nxdt_core.launch.supervision.hangs import Hang
from nxdt_core.launch.supervision.messages import Beat, Failure

__all__ = ["INTERRUPTION", "RootCause", "decide", "hung"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """How a run failed."""

    status: int
    text: str
    """What to print, once, for all ranks."""
    cause: str
    """Who failed, in a few words."""
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
    error = RankHung(
        kind=hang.kind,
        seconds=hang.seconds,
        ranks=tuple(_last_seen(beat, stopped=beat.rank in stopped) for beat in hang.ranks),
        waits=tuple(f"rank {beat.rank} in {beat.last or 'a collective'}" for beat in hang.waiting),
        stacks=next(filter(None, stacks.values()), ""),
    )
    names = ", ".join(f"rank {beat.rank} on {beat.host}" for beat in hang.ranks[:1])
    return RootCause(status=error.exit_status, text=str(error), cause=f"{names} made no progress")


def _last_seen(beat: Beat, *, stopped: bool) -> str:
    process = f"process {beat.pid}" + (" was stopped by a signal" if stopped else "")
    last = f", last collective: {beat.last}" if beat.last else ""
    return f"rank {beat.rank} on {beat.host} ({process}; last heartbeat: step {beat.step}, {beat.phase}{last})"
