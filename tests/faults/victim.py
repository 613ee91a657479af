"""A store as one rank of a job sees it, that can be struck at a chosen call or at a chosen request."""

from __future__ import annotations

from typing import Protocol

from nxdt_core.protocols.store import CheckpointStore
from tests.checkpoint.faults import FaultyStorage
from tests.faults.injection import CALL_DEATHS, CALLS, REQUEST_DEATHS, REQUESTS, Injection, let_go
from tests.faults.place import Place
from tests.http_faults import FaultProxy

__all__ = ["Victim", "victim_of"]


class Victim(Protocol):
    """What both kinds have in common."""

    storage: CheckpointStore

    def strike(self, injection: Injection | None) -> None:
        """Count from 0 again; from now on ``injection`` is to happen, and nothing where it is None."""
        ...

    def seen(self) -> list[str]:
        """The calls or requests since the last :meth:`strike`, in words."""
        ...


class _CallVictim:
    def __init__(self, place: Place) -> None:
        self.storage = FaultyStorage(place.open())

    def strike(self, injection: Injection | None) -> None:
        if injection is None:
            self.storage.strike()
            return
        let_go.clear()
        kind = {**CALLS, **CALL_DEATHS}[injection.kind]
        self.storage.strike(injection.number, when=kind.when, forever=kind.forever, error=kind.error)

    def seen(self) -> list[str]:
        return self.storage.history


class _RequestVictim:
    def __init__(self, place: Place) -> None:
        self._proxy = FaultProxy(place.endpoint_url).__enter__()  # until the process ends
        self.storage = place.open(self._proxy.url)

    def strike(self, injection: Injection | None) -> None:
        self._proxy.clear()
        if injection is not None:
            kind = {**REQUESTS, **REQUEST_DEATHS}[injection.kind]
            self._proxy.inject(kind.fault, at=injection.number, times=None if kind.forever else 1)

    def seen(self) -> list[str]:
        return [f"{request.method} {request.target}" for request in self._proxy.requests]


def victim_of(place: Place, way: str) -> Victim:
    """``way``: whether ``calls`` or ``requests`` are struck."""
    return _CallVictim(place) if way == "calls" else _RequestVictim(place)
