"""One run at a time saves to a store: it owns the store from its start to its end. Torch-free.

By a lock of the operating system where the store has one, which the kernel gives back when its owner dies, else by a
lease: objects in the store. Readers need neither. The objects of a lease are::

    owner-00000007.json    who took it, made by put_if_absent: of several takers of a number, one gets it
    owner-00000007.beat    a count that the owner raises while it lives; at its end it says so here

The greatest number owns, and it never goes down: a process that takes the store makes the next number, then deletes the
smaller ones. An owner whose count does not change for ``expiry_s``, by the watching process's clock, is dead: machines'
clocks need not agree. If it was only paused, it finds the greater number before it commits anything.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Protocol, final

from nxdt_core.checkpoint.commit import greatest_fencing, read_object
from nxdt_core.checkpoint.storage import explained_os_errors, reason_of
from nxdt_core.errors.checkpoints import OwnershipLost, StorageError, StoreInUse
from nxdt_core.protocols.store import CheckpointStore, LocksUnsupported, StorageLock

_log = logging.getLogger(__name__)

Liveness = Literal["running", "gone", "unknown"]

_PROC = Path("/proc")
_EXITING = 0x4
"""PF_EXITING of the kernel's ``task_struct.flags``: the process frees its memory, and then its locks."""

_JOBS = (
    ("slurm", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
    ("batch", "AWS_BATCH_JOB_ID", "AWS_BATCH_JOB_ATTEMPT"),
    ("elastic", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)
"""Schedulers that count how often a job restarts under its number. (Slurm sets the count from the first restart on.)"""
_NO_JOBS = frozenset({"", "none", "nxdt"})
"""Run ids that torchrun and ``nxdt train`` fill in themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """One process that saves, as recorded for other processes."""

    run: str
    """Name of the run, for people."""
    host: str
    pid: int
    since: str
    """UTC, ISO 8601."""
    machine: str = ""
    """Boot and process namespace within which ``pid`` is valid; empty where the system does not report them."""
    started: str = ""
    """Start of the process in the system's ticks: a later process may get the same ``pid``."""
    job: tuple[str, ...] = ()
    """Scheduler jobs in which it runs, each ``name=number``."""
    restarts: tuple[int, ...] = ()
    """Restarts by each of these schedulers."""
    token: str
    """Differs between any two owners."""

    def __str__(self) -> str:
        return f"{self.run!r} (process {self.pid} on {self.host}, since {self.since})"

    def encode(self) -> bytes:
        """Return the JSON that is stored."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    def liveness_of(self, other: Owner) -> Liveness:
        """Return the fate of another process, as far as this one, which must be alive, knows it without waiting."""
        if self.machine and self.machine == other.machine:
            return "running" if _runs(other.pid, other.started) else "gone"
        # A scheduler ends every process of a job before it starts the job again. The job number alone is
        # not enough: two steps of one job may run at the same time.
        restarted = bool(self.job) and self.job == other.job and self.restarts > other.restarts
        return "gone" if restarted else "unknown"


def decode_owner(data: bytes) -> Owner | None:
    """Return the inverse of :meth:`Owner.encode`; None for anything else, such as a note that is being written."""
    try:
        table = json.loads(data)
        table |= {name: tuple(table[name]) for name in ("job", "restarts")}
        return Owner(**table)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def this_process(run: str, environment: Mapping[str, str] | None = None) -> Owner:
    """Return this process as an owner.

    Args:
        run: what people call it.
        environment: None reads ``os.environ``.
    """
    variables = os.environ if environment is None else environment
    pid = os.getpid()
    jobs = [
        (f"{name}={variables[job]}", int(variables.get(count) or 0))
        for name, job, count in _JOBS
        if variables.get(job, "") not in _NO_JOBS and (variables.get(count) or "0").isdecimal()
    ]
    fields = _stat(pid)
    return Owner(
        run=run,
        host=socket.gethostname(),
        pid=pid,
        since=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=_machine(),
        started="" if fields is None else fields.started,
        job=tuple(job for job, _ in jobs),
        restarts=tuple(count for _, count in jobs),
        token=secrets.token_hex(8),
    )


def _machine() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class _Stat:
    """State of a process from proc_pid_stat(5)."""

    state: str
    flags: int
    started: str


def _stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # its name, in parentheses, may hold anything
    return _Stat(state=fields[0], flags=int(fields[6]), started=fields[19])


def _runs(pid: int, started: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    process = _stat(pid)
    if process is None:  # hidden from this user
        return True
    return process.started == started and process.state not in "ZX" and not process.flags & _EXITING


EXPIRY_S = 60.0
"""Silence after which an owner counts as dead."""


class Ownership(Protocol):
    """A store that this process owns."""

    fencing: int
    """Greater than that of every owner before, and of every checkpoint in the store."""

    def check(self) -> None:
        """Make sure of it, directly before something is committed or deleted.

        Raises:
            OwnershipLost: another run has taken the store, or may have.
        """
        ...

    def release(self) -> None:
        """Give the store back; may be called twice."""
        ...


_KEY = "owner"
_POLL_S = 0.2


@final
class LockedStore:
    """A store that this process has locked; see :class:`nxdt_core.checkpoint.ownership.Ownership`."""

    def __init__(self, storage: CheckpointStore, lock: StorageLock, me: Owner) -> None:
        self.fencing = 0
        self._storage = storage
        self._lock: StorageLock | None = lock
        self._me = me

    def check(self) -> None:
        """Raise unless the lock still keeps others out; one whose file was only deleted is taken again."""
        if self._lock is None:
            raise OwnershipLost(where=self._storage.uri, reason="this run has given it back")
        if self._lock.held():
            return
        before = self._storage.lock_note(_KEY)
        lock = None if before else self._storage.try_lock(_KEY, self._me.encode())
        if lock is None:
            owner = decode_owner(before or self._storage.lock_note(_KEY))
            reason = "its directory was moved or deleted, and another run began to save there"
            raise OwnershipLost(where=self._storage.uri, reason=f"{reason}, {owner}" if owner else reason)
        self._lock = lock

    def release(self) -> None:
        """Unlock the store, so that another run can take it."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


def lock_store(storage: CheckpointStore, me: Owner, *, say: Callable[[str], None], expiry_s: float) -> LockedStore:
    """Lock ``storage`` for the run ``me``.

    A lock whose owner runs on this machine is refused at once. Any other is waited for: its process may be about to
    end, and the server of a network file system notices the death of a machine late.

    Raises:
        StoreInUse: another process has it.
        LocksUnsupported: the file system has no locks.
    """
    deadline, reported = time.monotonic() + expiry_s, False
    while (lock := storage.try_lock(_KEY, me.encode())) is None:
        holder = decode_owner(storage.lock_note(_KEY))
        fate = "unknown" if holder is None else me.liveness_of(holder)
        owner = "another run" if holder is None else str(holder)
        if fate == "running":
            raise StoreInUse(where=storage.uri, owner=owner, reason="it is running on this machine")
        if time.monotonic() >= deadline:
            orphan = "its process is gone, but one that it started still holds its lock"
            reason = orphan if fate == "gone" else f"it has held its lock for another {expiry_s:g} s"
            raise StoreInUse(where=storage.uri, owner=owner, reason=reason)
        if holder is not None and not reported:
            say(f"waiting for up to {expiry_s:g} s: {storage.uri} is locked by {owner}")
            reported = True
        time.sleep(_POLL_S)
    owned = LockedStore(storage, lock, me)
    try:
        owned.fencing = greatest_fencing(storage) + 1
    except BaseException:
        owned.release()
        raise
    return owned


def is_locked(storage: CheckpointStore, me: Owner) -> bool:
    """Return whether a process has the lock that may still run.

    Raises:
        LocksUnsupported: the file system has no locks.
    """
    note = storage.lock_note(_KEY)
    lock = storage.try_lock(_KEY, note) if note else None  # without a note there has been no owner
    if lock is not None:
        lock.release()
    holder = decode_owner(note)
    return bool(note) and lock is None and (holder is None or me.liveness_of(holder) != "gone")


_PREFIX = "owner-"
_LEASE = re.compile(_PREFIX + r"([0-9]{8,})\.(json|beat)")
_BEATS = 6
"""Signs of life within the time after which an owner without one counts as dead."""


@dataclass(frozen=True, slots=True)
class _CurrentLease:
    """The owner with the greatest number, as recorded in its objects."""

    number: int
    owner: Owner | None
    """Owner that the object names; None where it cannot be decoded."""
    beat: bytes

    @property
    def released(self) -> bool:
        return self.beat == _RELEASED

    @property
    def name(self) -> str:
        return "another run" if self.owner is None else str(self.owner)


_RELEASED = json.dumps({"released": True}).encode()


@final
class _Heartbeat:
    """Calls ``beat`` every ``every_s`` seconds until it is stopped or the process ends; a fork does not inherit it."""

    def __init__(self, beat: Callable[[], None], *, every_s: float, what: str) -> None:
        self._beat = beat
        self._every_s = every_s
        self._what = what
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat of {what}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for a beat under way, and do no more."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        failing = False
        while not self._stopped.wait(self._every_s):
            try:
                self._beat()
            except (OSError, StorageError) as error:
                if not failing:
                    _log.warning("the heartbeat of %s fails, and will be tried again: %s", self._what, reason_of(error))
                failing = True
            else:
                failing = False


@final
class Lease:
    """A store that this process has taken; see :class:`nxdt_core.checkpoint.ownership.Ownership`."""

    def __init__(self, storage: CheckpointStore, number: int, me: Owner, *, expiry_s: float) -> None:
        self.fencing = number
        self._storage = storage
        self._me = me
        self._pid = os.getpid()
        self._count = 0
        self._beat()
        self._heartbeat: _Heartbeat | None = _Heartbeat(
            self._beat, every_s=expiry_s / _BEATS, what=f"{storage.uri}/{_json_key(number)}"
        )

    def check(self) -> None:
        """Raise where another process has taken the store since."""
        if self._heartbeat is None:
            raise OwnershipLost(where=self._storage.uri, reason="this run has given it back")
        current = _current_lease(self._storage)
        if current is None or current.owner != self._me:
            other = "the object that says so was deleted" if current is None else f"{current.name} has taken it over"
            why = "this process gave no sign of life for too long" if current else "see who deletes objects there"
            raise OwnershipLost(where=self._storage.uri, reason=f"{other}; {why}")

    def release(self) -> None:
        """Release it at once. Never raises for the store: the next process would only wait."""
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is None or os.getpid() != self._pid:
            return
        heartbeat.stop()
        try:
            _put(self._storage, _beat_key(self.fencing), _RELEASED)
        except (OSError, StorageError) as error:
            _log.warning("%s still says that this run owns it: %s", self._storage.uri, reason_of(error))

    def _beat(self) -> None:
        self._count += 1
        _put(self._storage, _beat_key(self.fencing), json.dumps({"beat": self._count}).encode())


def take_lease(storage: CheckpointStore, me: Owner, *, say: Callable[[str], None], expiry_s: float) -> Lease:
    """Take the lease of ``storage`` for the run ``me``.

    Take it at once where it has no owner or its owner is known to have ended; else after ``expiry_s`` without a sign of
    it.

    Raises:
        StoreInUse: its owner lives.
    """
    watched: _CurrentLease | None = None
    since = 0.0
    while True:
        current = _current_lease(storage)
        fate = "gone" if current is None or current.released else _liveness(current, me)
        if current is not None and fate == "running":
            raise _in_use(storage, current, "it is running on this machine")
        if current is not None and fate == "unknown":
            if watched is None:
                watched, since = current, time.monotonic()
                say(f"waiting for up to {expiry_s:g} s for a sign of life of {current.name}, who has {storage.uri}")
            elif current != watched:
                moved = current.number == watched.number
                raise _in_use(storage, current, "it has given a sign of life" if moved else "it has just taken it")
        if fate == "gone" or time.monotonic() - since >= expiry_s:
            lease = _claim(storage, me, above=0 if current is None else current.number, expiry_s=expiry_s)
            if lease is not None:
                return lease
            continue  # another taker was faster: see who
        time.sleep(min(1.0, expiry_s / (2 * _BEATS)))


def is_leased(storage: CheckpointStore, me: Owner) -> bool:
    """Return whether a process has the lease that may still run."""
    current = _current_lease(storage)
    return current is not None and not current.released and _liveness(current, me) != "gone"


def _liveness(claim: _CurrentLease, me: Owner) -> str:
    return "unknown" if claim.owner is None else me.liveness_of(claim.owner)


def _in_use(storage: CheckpointStore, claim: _CurrentLease, reason: str) -> StoreInUse:
    return StoreInUse(where=storage.uri, owner=claim.name, reason=reason)


def _claim(storage: CheckpointStore, me: Owner, *, above: int, expiry_s: float) -> Lease | None:
    """Claim the next number for ``me``; return None if another owner has it or a greater one.

    The number is greater than that of every manifest, so that a commit distinguishes a later owner from an earlier one,
    even where checkpoints were copied from another store.
    """
    number = max(above, greatest_fencing(storage)) + 1
    if not _put_claim(storage, number, me):
        return None
    try:
        keys = _keys(storage)
        # A smaller number is free again once the owner of a greater one has cleaned up.
        lease = None if max(keys, default=0) > number else Lease(storage, number, me, expiry_s=expiry_s)
    except BaseException:
        _withdraw(storage, number)
        raise
    if lease is None:
        _withdraw(storage, number)
        return None
    with suppress(OSError, StorageError):  # the next owner deletes what is left
        storage.delete_many([key for other in keys if other < number for key in keys[other]])
    return lease


def _put_claim(storage: CheckpointStore, number: int, me: Owner) -> bool:
    """Return whether ``me`` now has the object of ``number``. (A first try may have made it, and its answer been
    lost.)"""
    key, data = _json_key(number), me.encode()
    try:
        return storage.put_if_absent(key, data) or read_object(storage, key) == data
    except (OSError, StorageError):
        if read_object(storage, key) == data:
            return True
        raise


def _withdraw(storage: CheckpointStore, number: int) -> None:
    with suppress(OSError, StorageError):
        storage.delete_many([_json_key(number), _beat_key(number)])


def _current_lease(storage: CheckpointStore) -> _CurrentLease | None:
    taken = [number for number, keys in _keys(storage).items() if _json_key(number) in keys]
    if not taken:
        return None
    number = max(taken)
    data, beat = (read_object(storage, key) or b"" for key in (_json_key(number), _beat_key(number)))
    return _CurrentLease(number, decode_owner(data), beat)


def _keys(storage: CheckpointStore) -> dict[int, list[str]]:
    """The keys of each number."""
    keys: dict[int, list[str]] = {}
    for info in storage.list(_PREFIX):
        match = _LEASE.fullmatch(info.key)
        if match:
            keys.setdefault(int(match[1]), []).append(info.key)
    return keys


def _json_key(number: int) -> str:
    return f"{_PREFIX}{number:08d}.json"


def _beat_key(number: int) -> str:
    return f"{_PREFIX}{number:08d}.beat"


def _put(storage: CheckpointStore, key: str, data: bytes) -> None:
    with storage.open_write(key) as stream:
        stream.write(data)


def own(
    storage: CheckpointStore,
    *,
    run: str,
    say: Callable[[str], None],
    expiry_s: float = EXPIRY_S,
    me: Owner | None = None,
) -> Ownership:
    """Own ``storage`` until :meth:`Ownership.release` or the death of this process.

    Args:
        storage: the store in which checkpoints will be saved.
        run: description of the owner, shown to others.
        say: prints a line; called with the reason for a long wait.
        expiry_s: silence, in seconds, after which an owner elsewhere counts as dead; equal for all processes.
        me: this process; None determines it.

    Raises:
        StoreInUse: a living run owns it.
        StorageError: the store cannot be written.
    """
    me = me or this_process(run)
    with explained_os_errors(storage.uri):
        try:
            return lock_store(storage, me, say=say, expiry_s=expiry_s)
        except LocksUnsupported as error:
            if error.strerror:
                say(f"{storage.uri} is owned by a lease instead of a lock: {error.strerror}")
        return take_lease(storage, me, say=say, expiry_s=expiry_s)


@contextmanager
def owned(storage: CheckpointStore, *, run: str, say: Callable[[str], None]) -> Iterator[Ownership]:
    """:func:`own` for a block: what a command does that changes a store."""
    ownership = own(storage, run=run, say=say)
    try:
        yield ownership
    finally:
        ownership.release()


def is_owned(storage: CheckpointStore) -> bool:
    """Return whether a process owns ``storage`` that may still run, without waiting; nothing in it changes.

    Raises:
        StorageError: the store cannot be read.
    """
    me = this_process("")
    with explained_os_errors(storage.uri):
        with suppress(LocksUnsupported):
            if is_locked(storage, me):
                return True
        return is_leased(storage, me)
