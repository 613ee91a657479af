"""The messages between ranks and their supervisor: one line of JSON each."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

FailureKind = Literal["mistake", "bug", "interrupt", "death"]
"""``mistake``: an ``NxdtError``; ``death``: noted by the supervisor for a connection that ended without a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a connection."""

    token: str
    """Proof that the sender belongs to the run: it was read from the run's store."""
    rank: int | None
    """Rank of the process; None: the launcher of a further node."""
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A rank cannot continue; it waits for :class:`End`."""

    rank: int
    host: str
    kind: FailureKind
    text: str
    """Text to print, if this failure is the one that is reported."""
    status: int
    """Exit status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A rank has finished its part; it waits for :class:`End`, so that no rank leaves while others need it."""

    rank: int
    status: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A request to stop the run: asked of the supervisor by a launcher, sent on to the ranks by the supervisor."""

    signal: int
    urgent: bool = False
    """True to stop at once, not with a checkpoint at the end of a step; the supervisor does that itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The run is over: all ranks are done, or the supervisor ends them."""

    status: int
    """Exit status of a rank's process."""
    cause: str = ""
    """Cause of the failure in a few words: who failed; empty where all ranks are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A heartbeat of a rank, with what shows whether it makes progress."""

    rank: int
    host: str
    pid: int
    limit_s: float
    """Seconds without progress that the configuration allows."""
    step: int
    phase: str
    count: int
    """Pieces of work done, see :class:`nxdt_core.system.progress.Progress`."""
    begun: int
    """Collectives."""
    done: int
    """Collectives."""
    waiting: bool
    """A collective that has begun is not done."""
    last: str
    """The newest collective; empty where none is known."""
    cpu_s: float
    """CPU time of the process and of those that it has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatReceived:
    """Note that the supervisor has read a heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """The run hangs: each rank writes its stacks, and wakes processes of its host that are stopped."""

    silent: dict[str, list[int]]
    """Process ids of ranks that send no heartbeats, by host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dumped:
    """A rank has written its stacks."""

    rank: int
    directory: str
    """Empty where it could not."""


Message = Hello | Failure | Done | Stop | End | Beat | BeatReceived | Dump | Dumped

_CLASSES: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Return the line of a message."""
    return json.dumps({"is": type(message).__name__, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message of a line.

    Raises:
        ValueError: the line is not a message.
    """
    try:
        fields = json.loads(line)
        message: Message = _CLASSES[fields.pop("is")](**fields)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a message: {line[:80]!r}") from error
    return message
