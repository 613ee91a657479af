"""A process's connection to the supervisor: how it finds the supervisor, what it reports, and what ends it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from nxdt_core.distributed.process_group import join_timeout_s
from nxdt_core.errors.ranks import RankDied, RankHung
from nxdt_core.launch.supervision.heartbeat import (
    continue_stopped,
    enable_flight_recorder,
    heartbeat,
    is_stopped,
    write_stacks,
)
from nxdt_core.launch.supervision.messages import (
    BeatReceived,
    Done,
    Dump,
    Dumped,
    End,
    Failure,
    FailureKind,
    Hello,
    Message,
    Stop,
    decode,
    encode,
)
from nxdt_core.launch.supervision.root_cause import RootCause
from nxdt_core.launch.supervision.supervisor import Supervisor, keep_alive
from nxdt_core.protocols.launcher import RankEnvironment
from nxdt_core.system.progress import PROGRESS

_SHUTDOWN_S = 10.0
"""Seconds that a rank waits to be ended after it has reported its failure, or that it is done."""
_FLUSH_S = 1.0
_LONGEST_PACE_S = 10.0
"""Longest time between two heartbeats."""
_BEATS_PER_LIMIT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorAddress:
    """Address of the supervisor on the host of rank 0, and the token that admits to it."""

    port: int
    token: str
    host: str
    """Name of the host, for messages."""
    pid: int
    """Process that serves it."""
    in_rank_zero: bool
    """The supervisor runs in rank 0; otherwise in the launcher."""


def open_supervisor(
    store: TCPStore,
    place: RankEnvironment,
    *,
    world_size: int,
    in_rank_zero: bool,
    on_root_cause: Callable[[RootCause], None] = lambda root_cause: None,
) -> Supervisor:
    """Start the supervisor of a run in this process, and publish its address to the run's processes."""
    supervisor = Supervisor(
        world_size=world_size,
        address=place.master_addr,
        arrival_s=join_timeout_s(),
        in_rank_zero=in_rank_zero,
        on_root_cause=on_root_cause,
    )
    supervisor.start()
    address = SupervisorAddress(
        port=supervisor.port, token=supervisor.token, host=place.host, pid=os.getpid(), in_rank_zero=in_rank_zero
    )
    store.set(_key(place), json.dumps(asdict(address)))
    return supervisor


def is_published(store: TCPStore, place: RankEnvironment) -> bool:
    """Return whether there is a supervisor already, which is the launcher's."""
    return bool(store.check([_key(place)]))


def find_supervisor(store: TCPStore, place: RankEnvironment) -> SupervisorAddress:
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


class Client:
    """Reports the state of this process to the supervisor, and ends it with the others.

    Args:
        place: of this process; of a launcher, only ``host`` counts.
        supervisor: address of the supervisor.
        is_rank: whether this is a rank, which is ended with the others; a launcher is only informed.

    Raises:
        OSError: the supervisor does not answer.
    """

    def __init__(self, place: RankEnvironment, supervisor: SupervisorAddress, *, is_rank: bool = True) -> None:
        self.place = place
        self.on_stop: Callable[[int], None] | None = None
        """Takes the number of a signal; while it is None, a request to stop ends the run."""
        self.store: object = None
        """Kept alive: rank 0 may serve it to the others."""
        self.run_dir: Path | None = None
        """Directory of the run, once it is known; stacks are written below it if the run hangs."""
        self._supervisor = supervisor
        self._is_rank = is_rank
        self._end: End | None = None
        self._answered_at = time.monotonic()
        self._is_done = threading.Event()
        self.ended = threading.Event()
        """Set once the run has ended, or the connection."""
        self._sending = threading.Lock()
        self._connection = socket.create_connection((place.master_addr, supervisor.port))
        keep_alive(self._connection)
        self.send(Hello(token=supervisor.token, rank=place.rank if is_rank else None, host=place.host))
        threading.Thread(target=self._listen, name="client", daemon=True).start()

    @property
    def is_first(self) -> bool:
        """Return whether this process is the run's first to read the configuration: rank 0, without our launcher."""
        return self.place.rank == 0 and self._supervisor.in_rank_zero

    def watch(self, limit_s: float) -> None:
        """Send heartbeats from now on, so that the supervisor finds out whether this rank hangs.

        Args:
            limit_s: seconds without progress after which it does.
        """
        enable_flight_recorder()
        PROGRESS.supervised = True
        self.send(heartbeat(self.place, limit_s))
        threading.Thread(target=self._beat, args=(limit_s,), name="heartbeat", daemon=True).start()

    def fail(self, kind: FailureKind, text: str, status: int) -> NoReturn:
        """Report a failure; the supervisor decides whose is printed, and this process ends with all others."""
        self.send(self._failure(kind, text, status))
        self.ended.wait(_SHUTDOWN_S)
        _leave(status)

    def done(self, status: int) -> int:
        """Report that this rank is done, wait until all are, and return the process's exit status.

        Under our launcher that is 0: its agent takes anything else for a failure, and the launcher knows ``status``.
        """
        self._is_done.set()
        self.send(Done(rank=self.place.rank, status=status))
        self.ended.wait()
        return status if self._supervisor.in_rank_zero else 0

    def outcome(self) -> tuple[int, str | None]:
        """Return the exit status and why the run failed (None where it did not), once a launcher's ranks have ended."""
        self.ended.wait(_SHUTDOWN_S)
        if self._end is not None:
            return self._end.status, self._end.cause or None
        if self.ended.is_set():  # the connection broke, and no message said why
            return RankDied.exit_status, f"the launcher on {self._supervisor.host}, of node 0, died"
        return 0, None

    def _failure(self, kind: FailureKind, text: str, status: int) -> Failure:
        return Failure(rank=self.place.rank, host=self.place.host, kind=kind, text=text, status=status)

    def send(self, message: Message) -> None:
        """Send a message to the supervisor."""
        try:
            with self._sending:
                self._connection.sendall(encode(message))
        except OSError:  # the supervisor is gone, and the listening thread deals with that
            self.ended.wait(_SHUTDOWN_S)

    def _listen(self) -> None:
        try:
            for line in self._connection.makefile("rb"):
                self._receive(decode(line))
        except OSError:
            pass  # a broken connection is a lost one
        if self._is_rank and self._end is None:
            lowest = 1 if self._supervisor.in_rank_zero else 0
            if self.place.rank == lowest:
                error = RankDied(rank=0, host=self._supervisor.host)
                launcher = f"The launcher on {self._supervisor.host} died; its ranks end."
                print(error if self._supervisor.in_rank_zero else launcher, file=sys.stderr, flush=True)
            _leave(RankDied.exit_status)
        self.ended.set()

    def _receive(self, message: Message) -> None:
        match message:
            case Stop():
                take = self.on_stop
                if take is None:
                    self.send(self._failure("interrupt", "", 128 + message.signal))
                else:
                    take(message.signal)
            case BeatReceived():
                self._answered_at = time.monotonic()
            case Dump():
                continue_stopped(message.silent.get(self.place.host, ()))
                if self._is_rank:
                    self.send(Dumped(rank=self.place.rank, directory=self._write_stacks()))
            case End():
                if message.cause and self._is_rank:
                    _leave(message.status)
                if message.cause or self._end is None:
                    self._end = message
                self.ended.set()
            case _:
                raise ValueError(f"the supervisor sent {message}")

    def _write_stacks(self) -> str:
        return "" if self.run_dir is None else write_stacks(self.run_dir, self.place)

    def _beat(self, limit_s: float) -> None:
        """Send heartbeats until this rank is done, and notice that a supervisor in rank 0 is silent.

        That of a launcher may be silent: a person stops it with Ctrl-Z.
        """
        may_be_silent = not self._supervisor.in_rank_zero or self.place.rank == 0
        pace_s = min(_LONGEST_PACE_S, limit_s / _BEATS_PER_LIMIT)
        woken_at = self._answered_at = time.monotonic()
        while not self._is_done.wait(pace_s):
            self.send(heartbeat(self.place, limit_s))
            if time.monotonic() - woken_at > 2 * pace_s:  # this process was stopped: an answer may have come meanwhile
                self._answered_at = time.monotonic()
            woken_at = time.monotonic()
            silence_s = woken_at - self._answered_at
            if silence_s > limit_s and not may_be_silent:
                self._supervisor_hangs(silence_s)

    def _supervisor_hangs(self, silence_s: float) -> NoReturn:
        """Rank 0, which has the supervisor, is silent; the lowest rank that is left reports it."""
        stacks = self._write_stacks()
        time.sleep(1)  # for the others to write theirs
        if self.place.rank == 1:
            rank = (f"rank 0 on {self._supervisor.host}",)
            error = RankHung(kind="silent", seconds=silence_s, ranks=rank, waits=(), stacks=stacks)
            print(str(error), file=sys.stderr, flush=True)
            if self._supervisor.host == self.place.host and is_stopped(self._supervisor.pid):
                os.kill(self._supervisor.pid, signal.SIGKILL)  # it cannot end by itself
        _leave(RankHung.exit_status)


def _leave(status: int) -> NoReturn:
    """End this process now. Its main thread may be stuck in a collective with a rank that is no more, which no
    exception reaches, and the destructors of process groups would wait for the same."""
    flushing = threading.Thread(target=_flush, daemon=True)  # in a thread: the main one may hold a stream's lock
    flushing.start()
    flushing.join(_FLUSH_S)
    os._exit(status)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
