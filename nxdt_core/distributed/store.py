"""The store at which the ranks of a run meet, before there is any process group."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from threading import Thread

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from nxdt_core.errors.ranks import BadLaunchVariable, CannotReachRankZero, PortTaken
from nxdt_core.protocols.launcher import RankEnvironment

_JOIN_TIMEOUT_S = 300.0
"""Seconds that ranks wait for each other at the start: nodes boot, images load, file systems mount at different
speeds."""
_RETRY_S = 0.25
_TIMEOUT_VARIABLE = "NXDT_JOIN_TIMEOUT_S"


def join_timeout_s() -> float:
    """Return the seconds that ranks wait for each other at the start: ``NXDT_JOIN_TIMEOUT_S``, else five minutes.

    Raises:
        BadLaunchVariable: the variable holds no positive number.
    """
    text = os.environ.get(_TIMEOUT_VARIABLE)
    if not text:
        return _JOIN_TIMEOUT_S
    if not text.replace(".", "", 1).isdecimal() or float(text) == 0:
        raise BadLaunchVariable(name=_TIMEOUT_VARIABLE, value=text, wanted="a positive number of seconds")
    return float(text)


def connect_store(place: RankEnvironment, *, who: str | None = None) -> TCPStore:
    """Join the run's store; rank 0 serves it, unless an agent does. (It stays until the process of rank 0 ends.)

    Args:
        place: rank, and the address of the store.
        who: waits for it, for messages; this rank where None.

    Raises:
        PortTaken: rank 0 cannot serve it, another process listens there.
        CannotReachRankZero: no process serves it.
    """
    timeout_s = join_timeout_s()
    deadline, listens = time.monotonic() + timeout_s, False
    store = partial(
        TCPStore,
        place.master_addr,
        place.master_port,
        place.world_size,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
    )
    if place.rank == 0 and not place.store_is_hosted:
        try:
            server = store(is_master=True)
        except DistError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise PortTaken(address=place.master_addr, port=place.master_port) from error
        _served.setdefault((place.master_addr, place.master_port), server)
        return server
    # As a client, in a thread: its own timeout ends with the connection, so that a server that is not a store and never
    # answers would hold it for good.
    client: Future[TCPStore] = Future()

    def connect() -> None:
        try:
            client.set_result(store(is_master=False))
        except Exception as error:  # raised where the result is awaited
            client.set_exception(error)

    try:
        while not listens:  # the store's own client waits, too, but writes a C++ stack for each attempt
            try:
                socket.create_connection((place.master_addr, place.master_port), timeout=timeout_s).close()
                listens = True
            except OSError:
                if time.monotonic() + _RETRY_S > deadline:
                    raise
                time.sleep(_RETRY_S)
        Thread(target=connect, daemon=True).start()
        try:
            return client.result(timeout_s)
        except TimeoutError:
            raise TimeoutError("what listens there does not answer as the store of a run") from None
    except (OSError, DistError) as error:
        raise CannotReachRankZero(
            who=who or f"rank {place.rank}",
            host=place.host,
            address=place.master_addr,
            port=place.master_port,
            timeout_s=timeout_s,
            reason=getattr(error, "strerror", None) or str(error).partition("\n")[0],
        ) from error


_served: dict[tuple[str, int], TCPStore] = {}
"""Stores by address. A server ends with the last reference to it. A rank that starts a second group may already have
connected while rank 0 still leaves the first."""
