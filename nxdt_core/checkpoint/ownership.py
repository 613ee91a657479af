"""One run at a time saves to a store: it owns the store from its start to its end. Torch-free.

By a lock of the operating system where the store has one, which the kernel gives back when its owner dies, else by a
lease. Readers need neither."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, final

from nxdt_core.checkpoint.commit import greatest_fencing
from nxdt_core.checkpoint.lease import is_leased, take_lease
from nxdt_core.checkpoint.owner import Owner, decode_owner, this_process
from nxdt_core.checkpoint.storage import explained_os_errors
from nxdt_core.errors.checkpoints import OwnershipLost, StoreInUse
from nxdt_core.protocols.store import CheckpointStore, LocksUnsupported, StorageLock

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
