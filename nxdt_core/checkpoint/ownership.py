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
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from nxdt_core.checkpoint.commit import greatest_fencing, read_object
from nxdt_core.checkpoint.storage import explained_os_errors, reason_of
from nxdt_core.errors.checkpoints import OwnershipLost, StorageError, StoreInUse
from nxdt_core.protocols.store import CheckpointStore, LocksUnsupported, StorageLock
from nxdt_core.system.file_lock import Liveness, Owner, decode_owner, this_process

_log = logging.getLogger(__name__)

EXPIRY_S = 60.0
"""Silence after which an owner counts as dead."""


_KEY = "owner"
_POLL_S = 0.2


_PREFIX = "owner-"
_LEASE = re.compile(_PREFIX + r"([0-9]{8,})\.(json|beat)")
_BEATS = 6
"""Signs of life within the time after which an owner without one counts as dead."""
_RELEASED = json.dumps({"released": True}).encode()


@final
class LockedStore:
    """A store that this process has locked."""

    def __init__(self, storage: CheckpointStore, lock: StorageLock, me: Owner, fencing: int) -> None:
        self.fencing = fencing
        """Greater than that of every owner before, and of every checkpoint in the store."""
        self._storage = storage
        self._lock: StorageLock | None = lock
        self._me = me

    def check(self) -> None:
        """Make sure, directly before something is committed or deleted, that the lock still keeps others out; one whose
        file was only deleted is taken again.

        Raises:
            OwnershipLost: another run has taken the store, or may have.
        """
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
        """Unlock the store, so that another run can take it; may be called twice."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


@dataclass(frozen=True, slots=True)
class _CurrentLease:
    """The owner with the greatest number, as recorded in its objects."""

    number: int
    owner: Owner | None
    """Owner that the object names; None where it cannot be decoded."""
    beat: bytes

    @property
    def name(self) -> str:
        return "another run" if self.owner is None else str(self.owner)

    def liveness(self, me: Owner) -> Liveness:
        if self.beat == _RELEASED:
            return "gone"
        return "unknown" if self.owner is None else me.liveness_of(self.owner)


@final
class Lease:
    """A store that this process has taken; used as :class:`LockedStore` is."""

    def __init__(self, storage: CheckpointStore, number: int, me: Owner, *, expiry_s: float) -> None:
        self.fencing = number
        self._storage = storage
        self._me = me
        self._pid = os.getpid()
        self._count = 0
        self._beat()
        self._every_s = expiry_s / _BEATS
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._beat_until_stopped, name=f"heartbeat of {storage.uri}", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise where another process has taken the store since."""
        if self._thread is None:
            raise OwnershipLost(where=self._storage.uri, reason="this run has given it back")
        current = _current_lease(self._storage)
        if current is None or current.owner != self._me:
            other = "the object that says so was deleted" if current is None else f"{current.name} has taken it over"
            why = "this process gave no sign of life for too long" if current else "see who deletes objects there"
            raise OwnershipLost(where=self._storage.uri, reason=f"{other}; {why}")

    def release(self) -> None:
        """Release it at once; may be called twice. Never raises for the store: the next process would only wait."""
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._pid:  # a fork inherits no thread
            return
        self._stopped.set()
        thread.join()
        try:
            self._put(_RELEASED)
        except (OSError, StorageError) as error:
            _log.warning("%s still says that this run owns it: %s", self._storage.uri, reason_of(error))

    def _beat(self) -> None:
        self._count += 1
        self._put(json.dumps({"beat": self._count}).encode())

    def _put(self, data: bytes) -> None:
        with self._storage.open_write(_object_key(self.fencing, "beat")) as stream:
            stream.write(data)

    def _beat_until_stopped(self) -> None:
        failing = False
        while not self._stopped.wait(self._every_s):
            try:
                self._beat()
            except (OSError, StorageError) as error:
                if not failing:
                    where = f"{self._storage.uri}/{_object_key(self.fencing, 'json')}"
                    _log.warning("the heartbeat of %s fails, and will be tried again: %s", where, reason_of(error))
                failing = True
            else:
                failing = False


Ownership: TypeAlias = LockedStore | Lease
"""A store that this process owns."""


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
        fate = "gone" if current is None else current.liveness(me)
        if current is not None and fate == "running":
            raise StoreInUse(where=storage.uri, owner=current.name, reason="it is running on this machine")
        if current is not None and fate == "unknown":
            if watched is None:
                watched, since = current, time.monotonic()
                say(f"waiting for up to {expiry_s:g} s for a sign of life of {current.name}, who has {storage.uri}")
            elif current != watched:
                reason = "it has given a sign of life" if current.number == watched.number else "it has just taken it"
                raise StoreInUse(where=storage.uri, owner=current.name, reason=reason)
        if fate == "gone" or time.monotonic() - since >= expiry_s:
            lease = _claim(storage, me, above=0 if current is None else current.number, expiry_s=expiry_s)
            if lease is not None:
                return lease
            continue  # another taker was faster: see who
        time.sleep(min(1.0, expiry_s / (2 * _BEATS)))


def _claim(storage: CheckpointStore, me: Owner, *, above: int, expiry_s: float) -> Lease | None:
    """Claim the next number for ``me``; return None if another owner has it or a greater one.

    The number is greater than that of every manifest, so that a commit distinguishes a later owner from an earlier one,
    even where checkpoints were copied from another store.
    """
    number = max(above, greatest_fencing(storage)) + 1
    key, data = _object_key(number, "json"), me.encode()
    try:
        made = storage.put_if_absent(key, data) or read_object(storage, key) == data  # by a first try, say
    except (OSError, StorageError):
        if read_object(storage, key) != data:
            raise
        made = True
    if not made:
        return None
    lease = None
    try:
        keys = _keys(storage)
        # A smaller number is free again once the owner of a greater one has cleaned up.
        if max(keys, default=0) <= number:
            lease = Lease(storage, number, me, expiry_s=expiry_s)
    finally:
        if lease is None:
            with suppress(OSError, StorageError):
                storage.delete_many([key, _object_key(number, "beat")])
    if lease is not None:
        with suppress(OSError, StorageError):  # the next owner deletes what is left
            storage.delete_many([key for other in keys if other < number for key in keys[other]])
    return lease


def _current_lease(storage: CheckpointStore) -> _CurrentLease | None:
    taken = [number for number, keys in _keys(storage).items() if _object_key(number, "json") in keys]
    if not taken:
        return None
    number = max(taken)
    data, beat = (read_object(storage, f"{_PREFIX}{number:08d}.{kind}") or b"" for kind in ("json", "beat"))
    return _CurrentLease(number, decode_owner(data), beat)


def _keys(storage: CheckpointStore) -> dict[int, list[str]]:
    """The keys of each number."""
    keys: dict[int, list[str]] = {}
    for info in storage.list(_PREFIX):
        match = _LEASE.fullmatch(info.key)
        if match:
            keys.setdefault(int(match[1]), []).append(info.key)
    return keys


def _object_key(number: int, kind: Literal["json", "beat"]) -> str:
    return f"{_PREFIX}{number:08d}.{kind}"


def own(
    storage: CheckpointStore,
    *,
    run: str,
    say: Callable[[str], None],
    expiry_s: float = EXPIRY_S,
    me: Owner | None = None,
) -> Ownership:
    """Own ``storage`` until it is released or this process dies.

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
        deadline, reported = time.monotonic() + expiry_s, False
        try:
            # A lock whose owner runs on this machine is refused at once. Any other is waited for: its process may be
            # about to end, and the server of a network file system notices the death of a machine late.
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
        except LocksUnsupported as error:
            if error.strerror:
                say(f"{storage.uri} is owned by a lease instead of a lock: {error.strerror}")
            return take_lease(storage, me, say=say, expiry_s=expiry_s)
        try:
            return LockedStore(storage, lock, me, greatest_fencing(storage) + 1)
        except BaseException:
            lock.release()
            raise


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
            note = storage.lock_note(_KEY)
            lock = storage.try_lock(_KEY, note) if note else None  # without a note there has been no owner
            if lock is not None:
                lock.release()
            holder = decode_owner(note)
            if note and lock is None and (holder is None or me.liveness_of(holder) != "gone"):
                return True
        current = _current_lease(storage)
        return current is not None and current.liveness(me) != "gone"
