"""The hub of a run: every rank holds a connection to it, so that a death is heard at once, and one tells for all.

It lives in the launcher of the first node, or in rank 0 where somebody else's launcher started the ranks, as a thread
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

from nxdt_core.errors.ranks import RanksMissing
from nxdt_core.launch.hangs import Hang, HangWatch
from nxdt_core.launch.heartbeat import is_stopped, wake
from nxdt_core.launch.messages import (
    Beat,
    Done,
    Down,
    Dump,
    Dumped,
    End,
    Failure,
    Heard,
    Hello,
    Message,
    Stop,
    decode,
    encode,
)
from nxdt_core.launch.root_cause import INTERRUPTION, Verdict, decide, hung

__all__ = ["Hub", "keep_alive"]

_WINDOW_S = 1.0
"""How long after a first failure others are heard: ranks that make the same mistake make it within this."""
_FAREWELL_S = 3.0
"""How long the hub waits for others to go before it lets go of its own process."""
_PACE_S = 0.02
_WATCH_S = 1.0
"""Between two looks at the heartbeats."""
_DUMP_S = 5.0
"""How long ranks have to write their stacks."""
_LONGEST_LINE = 1 << 23
_KEEP_ALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 4))
"""A machine that is silent for 5 + 4 x 2 s is gone."""


class Hub:
    """Hears all ranks and ends them together.

    Args:
        world_size: ranks that will come.
        address: of this machine, as the others reach it.
        arrival_s: how long to wait for them.
        in_rank_zero: whether it lives in rank 0, which is then ended last.
        on_verdict: called once, from the hub's thread, when the run fails.
    """

    def __init__(
        self,
        *,
        world_size: int,
        address: str,
        arrival_s: float,
        in_rank_zero: bool,
        on_verdict: Callable[[Verdict], None] = lambda verdict: None,
    ) -> None:
        self.token = secrets.token_hex(16)
        self.verdict: Verdict | None = None
        """Why the run failed, once it has."""
        self._world_size = world_size
        self._arrival_s = arrival_s
        self._in_rank_zero = in_rank_zero
        self._on_verdict = on_verdict
        self._listener = _listen(address)
        self._loop = asyncio.new_event_loop()
        self._members: dict[asyncio.StreamWriter, Hello] = {}
        self._arrived: set[int] = set()
        self._failures: list[Failure] = []
        self._done: dict[int, int] = {}
        self._hangs = HangWatch()
        self._dumped: dict[int, str] = {}
        self._stop: Stop | None = None
        self._all_heard = asyncio.Event()
        self._judged = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def status(self) -> int:
        """Exit status of the run as the ranks that are done see it: the highest of theirs."""
        return max(self._done.values(), default=0)

    def start(self) -> None:
        """Begin to listen, in a thread that ends with the process."""
        threading.Thread(target=self._run, name="hub", daemon=True).start()

    def stop(self, signal: int, *, urgent: bool) -> None:
        """Tell all ranks to stop, also those that are still to come, or end them; may be called from any thread."""
        self._loop.call_soon_threadsafe(self._on_stop, Stop(signal=signal, urgent=urgent))

    def wait_for_verdict(self) -> Verdict | None:
        """Why the run failed, told to all; None where nobody has said so within a moment."""
        self._judged.wait(_FAREWELL_S)
        return self.verdict

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
                Verdict(status=error.exit_status, text=str(error), cause=f"{len(missing)} ranks are missing")
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
        self._welcome(hello, writer)
        with suppress(OSError, ValueError):
            while line := await reader.readline():
                self._hear(decode(line), hello, writer)
        del self._members[writer]
        writer.close()
        self._farewell(hello)

    def _welcome(self, hello: Hello, writer: asyncio.StreamWriter) -> None:
        self._members[writer] = hello
        if hello.rank is not None:
            self._arrived.add(hello.rank)
        if self._stop is not None:
            writer.write(encode(self._stop))

    def _hear(self, message: Message, sender: Hello, writer: asyncio.StreamWriter) -> None:
        match message:
            case Beat():
                self._hangs.hear(message, time.monotonic())
                self._tell(Heard(), [writer])
            case Dumped():
                self._dumped[message.rank] = message.directory
            case Failure():
                self._note(message)
            case Stop():
                self._on_stop(message)
            case Done():
                self._done[message.rank] = message.status
                self._hangs.forget(message.rank)
                if len(self._done) == self._world_size:
                    self._tell(End(status=self.status), self._members)
            case _:
                raise ValueError(f"{sender} sent {message}")

    def _farewell(self, hello: Hello) -> None:
        """A connection ended."""
        silent = hello.rank not in self._done and all(failure.rank != hello.rank for failure in self._failures)
        if hello.rank is not None and silent and self.verdict is None:
            self._note(Failure(rank=hello.rank, host=hello.host, kind="death", text="", status=1))

    def _note(self, failure: Failure) -> None:
        self._failures.append(failure)
        if len(self._failures) == 1:
            self._schedule(self._judge())
        if failure.kind == "death" or len({heard.rank for heard in self._failures}) == self._world_size:
            self._all_heard.set()

    async def _judge(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._all_heard.wait(), _WINDOW_S)
        await self._end(decide(self._failures, self._world_size))

    async def _watch(self) -> None:
        """Look at the heartbeats until one shows that the run hangs."""
        looked_at = time.monotonic()
        while self.verdict is None:
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
        wake(silent.get(here, ()))
        self._tell(Dump(silent=silent), self._members)
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
            self._tell(stop, self._members)

    def _schedule(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)

    async def _end(self, verdict: Verdict) -> None:
        """Speak, then end the others, then whoever shares this process; the first verdict stands."""
        if self.verdict is not None:
            return
        self.verdict = verdict
        self._on_verdict(verdict)
        down = Down(status=verdict.status, cause=verdict.cause)
        own = [writer for writer, hello in self._members.items() if self._in_rank_zero and hello.rank == 0]
        self._tell(down, [writer for writer in self._members if writer not in own])
        self._judged.set()
        for _ in range(int(_FAREWELL_S / _PACE_S)):
            if set(self._members) <= set(own):
                break
            await asyncio.sleep(_PACE_S)
        self._tell(down, own)

    def _tell(self, message: Message, members: Iterable[asyncio.StreamWriter]) -> None:
        for writer in list(members):
            with suppress(OSError):
                writer.write(encode(message))


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel notice that the other machine is gone."""
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
