"""Several calls in the same ranks, one after the other: processes are started once."""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, TypeVar
from unittest import mock

from nxdt_testing.processes.rank_worker import import_module
from nxdt_testing.ranks import RankPool

__all__ = ["Call", "LastingRanks", "in_turn", "run_in_turn"]

Name = TypeVar("Name")


@dataclass(frozen=True)
class Call:
    """A call on the first ``world`` ranks: on all ranks of a pool, or on one."""

    world: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def in_turn(calls: Sequence[Call]) -> list[Any]:
    """Make calls one after the other in this process; returns the result of each, None where this rank has no part."""
    results = []
    for call in calls:
        if int(os.environ["RANK"]) >= call.world:
            results.append(None)
            continue
        with mock.patch.dict(os.environ, WORLD_SIZE=str(call.world), LOCAL_WORLD_SIZE=str(call.world)):
            results.append(call.function(*call.arguments))
    return results


def run_in_turn(calls: Mapping[Name, Call], **options: Any) -> dict[Name, list[Any]]:
    """Make calls in as few processes as possible, since starting one costs more than a call.

    Args:
        calls: by name. Those on one rank are made in the smallest pool of the others.
        options: of :meth:`RankPool.run`, for the calls of each pool.

    Returns:
        By name, what each rank returned.
    """
    small = min((call.world for call in calls.values() if call.world > 1), default=1)
    found: dict[Name, list[Any]] = {}
    for world in sorted({max(call.world, small) for call in calls.values()}):
        names = [name for name, call in calls.items() if max(call.world, small) == world]
        reports = RankPool(world).run(in_turn, [calls[name] for name in names], **{"timeout_s": 120, **options})
        for place, name in enumerate(names):
            found[name] = [report[place] for report in reports[: calls[name].world]]
    return found


class LastingRanks:
    """``ranks(n).run(function, *arguments)`` as of pools, in the same ranks: a session costs half of a first one.

    Not for what an earlier call could change: resumes, memory, compiled graphs. A call that fails ends the ranks, and
    the next one starts others.
    """

    def __init__(self, size: int = 2) -> None:
        self._size = size
        self._executor = ThreadPoolExecutor(1)
        self._ended: Future[Any] | None = None
        self._connections: list[Connection] = []

    def __call__(self, world: int) -> LastingRanks._First:
        assert world <= self._size
        return self._First(self, world)

    @dataclass(frozen=True)
    class _First:
        """The first ranks, which have a world of their own."""

        ranks: LastingRanks
        world: int

        def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120) -> list[Any]:
            """Return what each rank returned."""
            return self.ranks._run(Call(self.world, function, arguments), timeout_s)

    def _run(self, call: Call, timeout_s: float) -> list[Any]:
        if self._ended is None:
            self._start()
        assert self._ended is not None
        home = call.function.__module__, sys.modules[call.function.__module__].__file__
        try:
            for connection in self._connections:
                connection.send_bytes(pickle.dumps((*home, timeout_s, pickle.dumps(call))))
            return [pickle.loads(connection.recv_bytes()) for connection in self._connections][: call.world]
        except (EOFError, OSError):  # the pool says which rank failed, and how
            failed, self._ended = self._ended, None
            failed.result()
            raise

    def _start(self) -> None:
        with Listener(family="AF_UNIX") as listener:
            self._ended = self._executor.submit(
                RankPool(self._size).run, answer_calls, listener.address, timeout_s=9999
            )
            connections = [listener.accept() for _ in range(self._size)]
        self._connections = sorted(connections, key=lambda connection: int(connection.recv_bytes()))

    def close(self) -> None:
        """End the ranks."""
        if self._ended is not None:
            for connection in self._connections:
                connection.close()
            self._ended.result()
        self._executor.shutdown()


def answer_calls(address: str) -> None:
    """Make the calls that come from ``address`` on this rank, until it hangs up. One that takes too long ends the rank
    with the stacks of its threads."""
    with Client(address, family="AF_UNIX") as connection:
        connection.send_bytes(os.environ["RANK"].encode())
        while True:
            try:
                module, file, timeout_s, call = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            import_module(module, file)
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.stderr)
            (result,) = in_turn([pickle.loads(call)])
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(pickle.dumps(result))
