"""How the processes of a run find its supervisor: an entry in the store at which they meet."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from nxdt_core.protocols.launcher import RankEnvironment

__all__ = ["SupervisorAddress", "find", "is_published", "publish"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorAddress:
    """Where the supervisor listens on the host of rank 0, and the word that admits to it."""

    port: int
    token: str
    host: str
    """Its name, for messages."""
    pid: int
    """Process that serves it."""
    in_rank_zero: bool
    """Whether it lives in rank 0; otherwise in the launcher."""


def publish(store: TCPStore, place: RankEnvironment, address: SupervisorAddress) -> None:
    """Publish the address of the supervisor to the run's processes."""
    store.set(_key(place), json.dumps(asdict(address)))


def is_published(store: TCPStore, place: RankEnvironment) -> bool:
    """Return whether there is a supervisor already, which is the launcher's."""
    return bool(store.check([_key(place)]))


def find(store: TCPStore, place: RankEnvironment) -> SupervisorAddress:
    """Wait for the supervisor's address.

    Raises:
        TimeoutError: no process published one within the store's timeout.
    """
    try:
        return SupervisorAddress(**json.loads(store.get(_key(place))))
    except DistError as error:
        raise TimeoutError("rank 0 has not come there") from error


def _key(place: RankEnvironment) -> str:
    return f"nxdt/{place.attempt}/supervisor"
