"""This process among all: the store at which ranks meet, joining and leaving the process group, and agreement between
hosts.

:mod:`nxdt_core.engine` sends tensors between devices over the groups of the mesh. This module sends what surrounds the
steps: flags, names, decisions. It uses a separate group on the hosts, so that it waits for no device and never mixes
with the collectives of training.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.distributed.environment import read_rank_environment
from nxdt_core.distributed.torch_versions import forget_shardings
from nxdt_core.errors import NxdtError
from nxdt_core.errors.ranks import BadLaunchVariable, CannotReachRankZero, NotEnoughDevices, PortTaken
from nxdt_core.protocols.launcher import RankEnvironment
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.system.progress import PROGRESS

__all__ = ["Ranks", "check_devices", "connect_store", "cores_of_process", "join_timeout_s"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_starts = itertools.count()
"""Default groups that this process has made: each has its own keys in the store, which keeps those of the last one."""

_COLLECTIVE_TIMEOUT_S = 1800.0
"""Longest wait within one collective. Dead ranks are noticed elsewhere, in seconds; this bounds deadlocks."""
_SUPERVISED_FACTOR = 4
"""Factor of the timeout in a supervised process. Its supervisor finds the rank that hangs before that, while torch
would blame the ranks that wait."""


_JOIN_TIMEOUT_S = 300.0
"""Seconds that ranks wait for each other at the start: nodes boot, images load, file systems mount at different
speeds."""
_RETRY_S = 0.25
_TIMEOUT_VARIABLE = "NXDT_JOIN_TIMEOUT_S"
_served: dict[tuple[str, int], TCPStore] = {}
"""Stores by address. A server ends with the last reference to it. A rank that starts a second group may already have
connected while rank 0 still leaves the first."""


class Ranks(RankAgreement):
    """The processes of a run. Alone, there is no process group, and every operation returns its argument.

    Example::

        ranks = Ranks.from_environment()
        ranks.start(device)
        newest = ranks.on_rank_zero(lambda: find_checkpoint(storage))
        ranks.stop()
    """

    def __init__(self, place: RankEnvironment) -> None:
        self.place = place
        self.rank = place.rank
        self.world_size = place.world_size
        self.local_rank = place.local_rank
        self.host = place.host
        self._group: dist.ProcessGroup | None = None
        self._owns_default = False
        self._asked: dict[str, tuple[torch.Tensor, dist.Work]] = {}
        self._siblings: list[Ranks] = []
        self.collective_timeout_s = _COLLECTIVE_TIMEOUT_S
        """Longest wait within one collective, as :meth:`start` has set it."""

    @classmethod
    def from_environment(cls) -> Self:
        """Read the place from the launcher's variables; a group that exists already decides instead."""
        place = read_rank_environment()
        if dist.is_initialized() and dist.get_world_size() != place.world_size:
            place = RankEnvironment(
                rank=dist.get_rank(), world_size=dist.get_world_size(), local_rank=place.local_rank, host=place.host
            )
        return cls(place)

    def start(self, device: torch.device, *, timeout_s: float = _COLLECTIVE_TIMEOUT_S) -> None:
        """Join the default process group with the backend of the device's profile; a second call does nothing.

        Collective. A default group that exists is used, and left to its creator.

        Args:
            device: of this rank; an accelerator is made the current one.
            timeout_s: longest wait within one collective; four times as long in a process that is supervised.

        Raises:
            NotEnoughDevices: there is no such device.
            PortTaken: rank 0 cannot serve the ranks' meeting point.
            CannotReachRankZero: no process serves it.
        """
        if self.world_size == 1 or self._group is not None:
            return
        if device.index is not None:
            check_devices(device, device.index + 1, self.host)
            profile_of(device).operations.set_index(device.index)
        self.collective_timeout_s = timeout_s * (_SUPERVISED_FACTOR if PROGRESS.supervised else 1)
        timeout = timedelta(seconds=self.collective_timeout_s)
        if not dist.is_initialized():
            dist.init_process_group(
                profile_of(device).process_group_backend,
                store=PrefixStore(f"nxdt/{self.place.attempt}/{next(_starts)}", connect_store(self.place)),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timeout,
                device_id=device if profile_of(device).binds_process_group else None,
            )
            self._owns_default = True
        self._group = _host_group(timeout)
        if not self._owns_default:
            return
        # A part of the cores where other ranks may use the same ones, unless OMP_NUM_THREADS is set: ranks that each
        # start one thread per core are slower than a single process.
        cores = cores_of_process()
        here = zlib.crc32(f"{self.host} {sorted(cores)}".encode())
        sharing = self.all_gather_object(here).count(here)
        threads = max(1, len(cores) // sharing)
        if threads < torch.get_num_threads() and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads)
            if self.rank == 0:
                message = "%d ranks share %d cores, and OMP_NUM_THREADS is not set: torch threads per rank: %d"
                _log.warning(message, sharing, len(cores), threads)

    def start_alone(self, device: torch.device) -> None:
        """Give a world of one process its own group, for code that requires one."""
        if dist.is_initialized():
            return
        backend = profile_of(device).process_group_backend
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        self._group, self._owns_default = dist.group.WORLD, True

    def sibling(self, *, timeout_s: float) -> Ranks:
        """Return the same processes over a separate group, for a thread that communicates in parallel with this one.
        Collective.

        The group ends when this one stops.

        Args:
            timeout_s: the longest wait within one collective.
        """
        other = Ranks(self.place)
        if self.world_size > 1 and self._group is not None:
            other._group = _host_group(timedelta(seconds=timeout_s))
            self._siblings.append(other)
        return other

    def stop(self) -> None:
        """Leave the groups that :meth:`start` made; may be called twice."""
        group, self._group, self._asked = self._group, None, {}
        while self._siblings:
            self._siblings.pop().stop()
        if group is None or not dist.is_initialized():
            return
        if self._owns_default:
            dist.destroy_process_group()
            forget_shardings()
            self._owns_default = False
        else:
            dist.destroy_process_group(group)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self._group is not None:
            dist.barrier(group=self._group)

    def broadcast_object(self, value: _T, source: int = 0) -> _T:
        """Return the value of rank ``source`` on every rank; it travels pickled, between processes that trust each
        other."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self._group, device=HOST)
        return box[0]

    def all_gather_object(self, value: _T) -> list[_T]:
        """Return the values of all ranks in their order, on every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def on_rank_zero(self, function: Callable[[], _T]) -> _T:
        """Return what ``function`` returns on rank 0, where alone it is called; its ``NxdtError`` is raised on every
        rank."""
        outcome: tuple[_T | None, NxdtError | None] = (None, None)
        if self.rank == 0:
            try:
                outcome = (function(), None)
            except NxdtError as error:
                outcome = (None, error)
        value, problem = self.broadcast_object(outcome)
        if problem is not None:
            raise problem
        return cast(_T, value)

    def any_rank(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on any rank."""
        return self.largest(int(flag)) > 0

    def largest(self, value: int) -> int:
        """Return the largest ``value`` of all ranks."""
        if self._group is None:
            return value
        box = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._group)
        return int(box)

    def largest_before(self, value: int, *, topic: str = "") -> int:
        """Give in this step's ``value`` and get the largest of the step before: all ranks get the same, and none waits.

        (The answer to a question of this step would hold every host until the slowest has asked.) Alone, the answer
        is ``value`` itself. Questions of different topics do not mix.
        """
        if self._group is None:
            return value
        answer = self.last_answer(topic=topic)
        box = torch.tensor([value], dtype=torch.int64)
        work = dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._asked[topic] = (box, cast(dist.Work, work))
        return answer

    def last_answer(self, *, topic: str = "") -> int:
        """Return the answer that :meth:`largest_before` still owes, 0 where it owes none; waits for it."""
        if topic not in self._asked:
            return 0
        box, work = self._asked.pop(topic)
        work.wait()
        return int(box)


def _host_group(timeout: timedelta) -> dist.ProcessGroup:
    """Return the group of all ranks over the hosts. Collective."""
    return cast(dist.ProcessGroup, dist.new_group(backend=profile_of(HOST).process_group_backend, timeout=timeout))


def cores_of_process() -> frozenset[int]:
    """Return the cores that this process may use."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def check_devices(device: torch.device, wanted: int, host: str) -> None:
    """Refuse more ranks on this machine than it has devices of the type of ``device``; of hosts there are enough.

    Raises:
        NotEnoughDevices: there are fewer.
    """
    if profile_of(device).host:
        return
    count = profile_of(device).operations.count()
    if wanted > count:
        raise NotEnoughDevices(host=host, wanted=wanted, found=count, device_type=device.type)


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
