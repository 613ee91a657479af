"""What can happen to a call of a store or to a request on its way to a server, and what a save may tell of it."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tests.checkpoint.faults import When, disk_full
from tests.http_faults import Exchange, Fault, lose_answer, reset, stall
from tests.s3_server import refuse_s3

__all__ = ["CALLS", "CALL_DEATHS", "REQUESTS", "REQUEST_DEATHS", "Call", "Injection", "Request", "let_go"]


@dataclass(frozen=True, slots=True, order=True)
class Injection:
    """One fault: its kind, and on which rank, at which of its calls (or requests) of a save."""

    kind: str
    rank: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A fault of a call of the store."""

    when: When
    """Relative to the call's effect."""
    error: Callable[[], BaseException | None]
    """Makes what the call raises; None lets it go on."""
    told: frozenset[str] = frozenset()
    """Classes of the errors that a save may end with."""
    forever: bool = False
    """Whether all later calls fail, too."""
    writes: bool = False
    """Whether it makes sense for writes only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A fault of an HTTP request, of one of its attempts or of all later ones."""

    fault: Fault
    told: frozenset[str] = frozenset()
    """Classes of the errors that a save may end with; of none where it must succeed."""
    forever: bool = False


class MadeUpBug(Exception):
    """No error for users."""


let_go = threading.Event()
"""Ends a call that hangs. Nothing else does: whoever waits for it waits for ever."""


def _hang() -> None:
    let_go.wait()


def _broken() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_before(exchange: Exchange) -> None:
    _die()


def _die_after(exchange: Exchange) -> None:
    exchange.forward()
    _die()


_FULL, _BROKEN, _LATE = frozenset({"StorageFull"}), frozenset({"StorageError"}), frozenset({"SaveTookTooLong"})
_BUG = frozenset({"MadeUpBug", "CheckpointRankFailed"})
CALLS = {
    "exception": Call(when="before", error=MadeUpBug, told=_BUG),
    "exception after": Call(when="after", error=MadeUpBug, told=_BUG),
    "disk full": Call(when="before", error=disk_full, told=_FULL),
    "disk full for ever": Call(when="during", error=disk_full, told=_FULL, forever=True),
    "EIO": Call(when="before", error=_broken, told=_BROKEN),
    "EIO after": Call(when="after", error=_broken, told=_BROKEN),
    "cut off": Call(when="during", error=_broken, told=_BROKEN),
    "cut off in silence": Call(
        when="during", error=lambda: None, told=frozenset({"CheckpointFilesMissing"}), writes=True
    ),
    "hang": Call(when="before", error=_hang, told=_LATE),
    "hang after": Call(when="after", error=_hang, told=_LATE),
}
CALL_DEATHS = {
    "SIGKILL": Call(when="before", error=_die),
    "SIGKILL in the middle": Call(when="during", error=_die),
    "SIGKILL after": Call(when="after", error=_die),
}

_FAILED, _OVERLOADED = frozenset({"S3Failed"}), frozenset({"S3Overloaded"})
_UNREACHABLE = frozenset({"S3Unreachable"})
REQUESTS = {
    "500": Request(fault=refuse_s3(500, "InternalError")),
    "503": Request(fault=refuse_s3(503, "SlowDown")),
    "reset": Request(fault=reset),
    "lost answer": Request(fault=lose_answer),
    "silence": Request(fault=stall(60)),
    "500 for ever": Request(fault=refuse_s3(500, "InternalError"), told=_FAILED, forever=True),
    "503 for ever": Request(fault=refuse_s3(503, "SlowDown"), told=_OVERLOADED, forever=True),
    "reset for ever": Request(fault=reset, told=_UNREACHABLE, forever=True),
    "lost answers for ever": Request(fault=lose_answer, told=_UNREACHABLE, forever=True),
}
REQUEST_DEATHS = {
    "SIGKILL at a request": Request(fault=_die_before),
    "SIGKILL after a request": Request(fault=_die_after),
}
