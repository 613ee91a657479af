"""The supervisor of a run: every rank holds a connection to it, so that a death is noticed at once and reported once.

It lives in the launcher of the first node, or in rank 0 where another launcher started the ranks, as a thread
with an event loop. A process that dies, however it dies, has its connections closed by the kernel; a machine that
vanishes is missed by TCP's keep-alive. A rank that lives and makes no progress is found by its heartbeats.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from nxdt_core.errors.ranks import RankDied, RanksMissing
from nxdt_core.launch.supervision.heartbeat import continue_stopped, is_stopped
from nxdt_core.launch.supervision.messages import (
    Beat,
    BeatReceived,
    Done,
    Dump,
    Dumped,
    End,
    Failure,
    Hello,
    Message,
    Stop,
    decode,
    encode,
)
from nxdt_core.launch.supervision.root_cause import INTERRUPTION, Hang, HangWatch, RootCause, decide, hung

_WINDOW_S = 1.0
"""Seconds in which others are collected after a first failure: ranks that make the same mistake make it within this."""
_SHUTDOWN_S = 3.0
"""Seconds that the supervisor waits for other processes to leave before it releases its own."""
_PACE_S = 0.02
_WATCH_S = 1.0
"""Time between two checks of the heartbeats."""
_DUMP_S = 5.0
"""Seconds that ranks have to write their stacks."""
_LONGEST_LINE = 1 << 23
_KEEP_ALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 4))
"""A machine that is silent for 5 + 4 x 2 s is gone."""


class Supervisor:
    """Receives the state of all ranks and ends them together.

    Args:
        world_size: ranks that will come.
        address: of this machine, as the others reach it.
        arrival_s: how long to wait for them.
        in_rank_zero: whether it lives in rank 0, which is then ended last.
        on_root_cause: called once, from the supervisor's thread, when the run fails.
    """

    def __init__(
        self,
        *,
        world_size: int,
        address: str,
        arrival_s: float,
        in_rank_zero: bool,
        on_root_cause: Callable[[RootCause], None] = lambda root_cause: None,
    ) -> None:
        self.token = secrets.token_hex(16)
        self.root_cause: RootCause | None = None
        """Why the run failed, once it has."""
        self._world_size = world_size
        self._arrival_s = arrival_s
        self._in_rank_zero = in_rank_zero
        self._on_root_cause = on_root_cause
        self._listener = _listen(address)
        self._loop = asyncio.new_event_loop()
        self._members: dict[asyncio.StreamWriter, Hello] = {}
        self._arrived: set[int] = set()
        self._failures: list[Failure] = []
        self._done: dict[int, int] = {}
        self._hangs = HangWatch()
        self._dumped: dict[int, str] = {}
        self._stop: Stop | None = None
        self._failures_complete = asyncio.Event()
        self._decided = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """Return the TCP port that it listens on."""
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def status(self) -> int:
        """Return the exit status of the run: the highest of the ranks that are done."""
        return max(self._done.values(), default=0)

    def start(self) -> None:
        """Start to listen, in a thread that ends with the process."""
        threading.Thread(target=self._run, name="supervisor", daemon=True).start()

    def stop(self, signal: int, *, urgent: bool) -> None:
        """Ask all ranks to stop, also those that are still to come, or end them; may be called from any thread."""
        self._loop.call_soon_threadsafe(self._on_stop, Stop(signal=signal, urgent=urgent))

    def wait_for_root_cause(self) -> RootCause | None:
        """Return why the run failed; None where no rank has reported a failure within 3 s."""
        self._decided.wait(_SHUTDOWN_S)
        return self.root_cause

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        await asyncio.start_server(self._meet, sock=self._listener, limit=_LONGEST_LINE)
        self._schedule(self._watch())
        await asyncio.sleep(self._arrival_s)
        missing = tuple(rank for rank in range(self._world_size) if rank not in self._arrived)
        if missing:
            error = RanksMissing(unit="rank", total=self._world_size, missing=missing, timeout_s=self._arrival_s)
            await self._end(
                RootCause(status=error.exit_status, text=str(error), cause=f"{len(missing)} ranks are missing")
            )
        await asyncio.Event().wait()  # the thread ends with the process

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep_alive(writer.get_extra_info("socket"))
        hello = None
        with suppress(OSError, ValueError):
            hello = decode(await reader.readline())
        if not isinstance(hello, Hello) or not secrets.compare_digest(hello.token, self.token):
            writer.close()  # a stranger
            return
        self._members[writer] = hello
        if hello.rank is not None:
            self._arrived.add(hello.rank)
        if self.root_cause is not None:  # it comes late
            self._send(End(status=self.root_cause.status, cause=self.root_cause.cause), [writer])
        elif self._stop is not None:
            self._send(self._stop, [writer])
        with suppress(OSError, ValueError):
            while line := await reader.readline():
                self._receive(decode(line), hello, writer)
        del self._members[writer]
        writer.close()
        if hello.rank is None:
            self._schedule(self._end_without(hello.host))
            return
        silent = hello.rank not in self._done and all(failure.rank != hello.rank for failure in self._failures)
        if silent and self.root_cause is None:
            self._add_failure(Failure(rank=hello.rank, host=hello.host, kind="death", text="", status=1))

    def _receive(self, message: Message, sender: Hello, writer: asyncio.StreamWriter) -> None:
        match message:
            case Beat():
                self._hangs.record(message, time.monotonic())
                self._send(BeatReceived(), [writer])
            case Dumped():
                self._dumped[message.rank] = message.directory
            case Failure():
                self._add_failure(message)
            case Stop():
                self._on_stop(message)
            case Done():
                self._done[message.rank] = message.status
                self._hangs.forget(message.rank)
                if len(self._done) == self._world_size:
                    self._send(End(status=self.status), self._members)
            case _:
                raise ValueError(f"{sender} sent {message}")

    async def _end_without(self, host: str) -> None:
        """End the run of a further launcher that has ended: its ranks end with it, also those that are still to come.
        If they are connected, their own reports name the cause."""
        await asyncio.sleep(_WINDOW_S)
        if self._failures or len(self._done) == self._world_size:
            return
        rank = min(set(range(self._world_size)) - self._arrived, default=0)
        died = RankDied(rank=rank, host=host, how=" with its launcher")
        await self._end(RootCause(status=died.exit_status, text=str(died), cause=f"the launcher on {host} died"))

    def _add_failure(self, failure: Failure) -> None:
        self._failures.append(failure)
        if len(self._failures) == 1:
            self._schedule(self._decide())
        if failure.kind == "death" or len({failed.rank for failed in self._failures}) == self._world_size:
            self._failures_complete.set()

    async def _decide(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._failures_complete.wait(), _WINDOW_S)
        await self._end(decide(self._failures, self._world_size))

    async def _watch(self) -> None:
        """Look at the heartbeats until one shows that the run hangs."""
        looked_at = time.monotonic()
        while self.root_cause is None:
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            if now - looked_at > 3 * _WATCH_S:  # this process itself was stopped, and has not read what came meanwhile
                self._hangs.excuse(now)
            looked_at = now
            hang = self._hangs.check(now)
            if hang is not None and not self._failures:
                await self._end_hung(hang)

    async def _end_hung(self, hang: Hang) -> None:
        """Let every rank write its stacks, then end the run."""
        here = socket.gethostname()
        stopped = frozenset(beat.rank for beat in hang.ranks if beat.host == here and is_stopped(beat.pid))
        silent: dict[str, list[int]] = {}
        for beat in hang.ranks if hang.kind == "silent" else ():
            silent.setdefault(beat.host, []).append(beat.pid)
        continue_stopped(silent.get(here, ()))
        self._send(Dump(silent=silent), self._members)
        for _ in range(int(_DUMP_S / _PACE_S)):
            if {hello.rank for hello in self._members.values() if hello.rank is not None} <= set(self._dumped):
                break
            await asyncio.sleep(_PACE_S)
        await self._end(hung(hang, stopped, self._dumped))

    def _on_stop(self, stop: Stop) -> None:
        if stop.urgent:
            self._schedule(self._end(INTERRUPTION))
        elif self._stop is None:
            self._stop = stop
            self._send(stop, self._members)

    def _schedule(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)

    async def _end(self, root_cause: RootCause) -> None:
        """Report the first root cause, end the other processes, then the rank of this one."""
        if self.root_cause is not None:
            return
        self.root_cause = root_cause
        self._on_root_cause(root_cause)
        end = End(status=root_cause.status, cause=root_cause.cause)
        first = [writer for writer, hello in self._members.items() if self._in_rank_zero and hello.rank == 0]
        self._send(end, [writer for writer in self._members if writer not in first])
        self._decided.set()
        for _ in range(int(_SHUTDOWN_S / _PACE_S)):
            if set(self._members) <= set(first):
                break
            await asyncio.sleep(_PACE_S)
        self._send(end, first)

    def _send(self, message: Message, members: Iterable[asyncio.StreamWriter]) -> None:
        for writer in list(members):
            with suppress(OSError):
                writer.write(encode(message))


def keep_alive(connection: socket.socket) -> None:
    """Turn on TCP keep-alive, so that the kernel notices when the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listen(address: str) -> socket.socket:
    """A free port of ``address``, or of all interfaces where that is not this machine's own (but a service's, say)."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.bind(where)
    except OSError:
        listener = socket.create_server(("", 0))
    listener.listen(1024)
    listener.setblocking(False)
    return listener
