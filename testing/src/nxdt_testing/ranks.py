"""Real processes for tests of distributed code: one function on every rank, results in rank order.

Example::

    def total(value):                       # at the top level of any file
        with process_group():
            tensor = torch.tensor([value + dist.get_rank()])
            dist.all_reduce(tensor)
            return tensor.item()

    assert RankPool(2).run(total, 10) == [21, 21]

Importing torch is paid once for all pools of a Python process: a server that has imported it forks the ranks, which
takes milliseconds, and each run meets processes in which no group, cache or device is left from the run before. In
lasting ranks a run meets what earlier ones left: the first session of a process costs twice what a later one does.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, final

import torch.distributed as dist

from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.distributed.torch_versions import forget_shardings
from nxdt_testing.processes.rank_worker import STACK_SIGNAL, Outcome, Task, serve

__all__ = ["RankPool", "RanksFailed", "end_lasting_ranks", "process_group"]

_HOST = "127.0.0.1"
_PRELOAD = ("nxdt_testing.processes.preload", "nxdt_testing.processes.rank_worker")
_ATTEMPTS = 3
"""Runs that may start over because another process took the port between its choice and its use."""
_PORT_TAKEN = ("EADDRINUSE", "address already in use")
_GRACE_S = 5.0
"""Time that the other ranks get once one has failed, to see a closed connection and report it."""
_STACKS_S = 2.0
_LOG_CHARACTERS = 6000


class RanksFailed(AssertionError):
    """A rank raised, died or hung. The message holds every rank's account, the first to fail first."""

    def __init__(self, summary: str, accounts: dict[int, str]) -> None:
        parts = [f"--- rank {rank} {'-' * 40}\n{account.rstrip()}" for rank, account in accounts.items()]
        super().__init__("\n".join([summary, *parts]))
        self.summary = summary
        self.accounts = accounts
        """Text by rank, of those that did not return."""


@contextmanager
def process_group(timeout_s: float = 30, backend: str | None = None) -> Iterator[None]:
    """Join the default process group that the environment describes, and leave it at the end.

    ``backend``: of the host's profile where None.

    A rank that raises does not leave: the pool ends its process once it has reported why. Only then do the others see
    a closed connection, so that the first to fail is known.
    """
    dist.init_process_group(backend or profile_of(HOST).process_group_backend, timeout=timedelta(seconds=timeout_s))
    yield
    dist.barrier()
    dist.destroy_process_group()
    forget_shardings()


@final
class RankPool:
    """Runs functions on ``size`` ranks of 127.0.0.1, with one thread each.

    Args:
        size: how many ranks.
        lasting: whether runs take the same processes, which all lasting pools of a size share, until one fails or
            :func:`end_lasting_ranks` is called. Not for what an earlier run could change, such as peaks of memory and
            compiled graphs. By default, each run has new processes.
    """

    def __init__(self, size: int, *, lasting: bool = False) -> None:
        self.size = size
        self.lasting = lasting

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = 60,
        threads: int = 1,
        environment: dict[str, str] | None = None,
    ) -> list[Any]:
        """Call ``function(*arguments)`` on every rank.

        Args:
            function: of the top level of a module or file; it finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
                MASTER_ADDR and MASTER_PORT in the environment and may join a process group.
            arguments: anything that pickles; the same on every rank.
            timeout_s: for the whole call.
            threads: of torch in each rank.
            environment: further variables.

        Returns:
            What each rank returned, by rank.

        Raises:
            RanksFailed: a rank raised, died or did not end in time; all are stopped then.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            lasting = _lasting.pop(self.size, None) if self.lasting else None
            ranks = lasting or _Ranks(self.size)
            try:
                results = _Run(function, arguments, ranks, threads, environment or {}).results(timeout_s)
            except BaseException as failed:
                ranks.stop()
                taken = isinstance(failed, RanksFailed) and any(word in str(failed) for word in _PORT_TAKEN)
                if attempt == _ATTEMPTS or not taken:
                    raise
                continue
            if self.lasting:
                _lasting[self.size] = ranks
            else:
                ranks.stop()
            return results
        raise AssertionError("unreachable")


class _Ranks:
    """Processes of ranks, each with a connection and a file for what it writes."""

    def __init__(self, size: int) -> None:
        self._logs = tempfile.TemporaryDirectory(prefix="ranks-")
        self.processes: list[BaseProcess] = []
        self.connections: list[Connection] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOAD))
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, self.log(rank)), name=f"rank {rank}", daemon=True)
            process.start()  # returns once the server, which imports torch before the first, has forked
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def log(self, rank: int) -> Path:
        return Path(self._logs.name) / f"rank-{rank}.log"

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.join()
            process.close()
            connection.close()
        self._logs.cleanup()


_lasting: dict[int, _Ranks] = {}
"""By their number, so that all have carried out the same: torch and sessions count, and name groups by it."""


def end_lasting_ranks() -> None:
    """End the processes of lasting pools, so that what follows starts others."""
    while _lasting:
        _lasting.popitem()[1].stop()


Finalize(None, end_lasting_ranks, exitpriority=0)  # not by SIGTERM as other daemons: a session may still handle that


class _Run:
    """One call on all ranks: sends the tasks, collects the outcomes."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        ranks: _Ranks,
        threads: int,
        environment: dict[str, str],
    ) -> None:
        self.name = function.__qualname__
        self.size = size = len(ranks.processes)
        self._ranks = ranks
        self._processes, self._connections = ranks.processes, ranks.connections
        self._module = function.__module__
        self._file = getattr(sys.modules[function.__module__], "__file__", None) or ""
        self._arguments = pickle.dumps(arguments)
        with socket.socket() as probe:
            probe.bind((_HOST, 0))
            port = probe.getsockname()[1]
        self._environment = {
            **environment,
            "OMP_NUM_THREADS": str(threads),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(port),
        }
        self._outcomes: dict[int, Outcome] = {}

    def results(self, timeout_s: float) -> list[Any]:
        for rank, connection in enumerate(self._connections):
            self._ranks.log(rank).write_bytes(b"")
            task = Task(
                module=self._module,
                file=self._file,
                qualname=self.name,
                arguments=self._arguments,
                environment={**self._environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                directory=os.getcwd(),
                path=sys.path,
            )
            with suppress(BrokenPipeError):  # of one that has ended, which `_collect` reports
                connection.send(task)
        failure = self._collect(time.monotonic() + timeout_s)
        if failure is not None:
            raise self._failed(failure if failure else f"not done within {timeout_s:g} s")
        return [self._outcomes[rank].value for rank in range(self.size)]

    def _collect(self, deadline: float) -> str | None:
        """Read outcomes until all are here; otherwise say what went wrong, "" for the timeout."""
        failure: str | None = None
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return failure or ""
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                problem = self._receive(rank, connection)
                if problem and failure is None:
                    failure = problem
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return failure

    def _receive(self, rank: int, connection: Connection) -> str | None:
        try:
            outcome: Outcome = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            process = self._processes[rank]
            process.join(_STACKS_S)
            return f"rank {rank} died with exit code {process.exitcode}"
        self._outcomes[rank] = outcome
        if outcome.error:
            self._processes[rank].kill()  # its connections close, so that the others need not wait for it
        return f"rank {rank} raised {_last_line(outcome.error)}" if outcome.error else None

    def _failed(self, failure: str) -> RanksFailed:
        silent = [rank for rank in range(self.size) if rank not in self._outcomes]
        self._write_stacks(silent)
        raised = {rank: outcome for rank, outcome in self._outcomes.items() if outcome.error}
        accounts = {
            rank: f"{outcome.error}{self._output(rank)}"
            for rank, outcome in sorted(raised.items(), key=lambda item: item[1].at_s)
        }
        for rank in silent:
            ended = self._processes[rank].exitcode
            state = "still running, with these stacks:" if ended is None else f"died with exit code {ended}"
            accounts[rank] = f"{state}\n{self._output(rank)}"
        if raised:
            first = next(iter(accounts))
            failure = f"rank {first} raised {_last_line(raised[first].error)}"
        return RanksFailed(f"{self.name} on {self.size} ranks: {failure}", accounts)

    def _write_stacks(self, ranks: Sequence[int]) -> None:
        """Let those that run write their stacks, and wait until their logs have them."""
        sizes = {}
        for rank in ranks:
            pid = self._processes[rank].pid
            if pid is not None and self._processes[rank].exitcode is None:
                sizes[rank] = _size(self._ranks.log(rank))
                os.kill(pid, STACK_SIGNAL)
        deadline = time.monotonic() + _STACKS_S
        while any(_size(self._ranks.log(rank)) == size for rank, size in sizes.items()) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05 * bool(sizes))  # the first bytes are there, the rest follows within this

    def _output(self, rank: int) -> str:
        """The end of what the rank wrote."""
        path = self._ranks.log(rank)
        return path.read_text(errors="replace")[-_LOG_CHARACTERS:] if path.exists() else ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _last_line(text: str | None) -> str:
    return (text or "").strip().rpartition("\n")[2]
