"""Owning a store by the system's own lock, which the kernel gives back when its owner dies. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from nxdt_core.checkpoint.ownership.owner import Owner, decode_owner
from nxdt_core.checkpoint.read.committed import greatest_fencing
from nxdt_core.errors.checkpoints import OwnershipLost, StoreInUse
from nxdt_core.protocols.store import LockableStorage, StorageLock

__all__ = ["LockedStore", "is_locked", "lock_store"]

_KEY = "owner"
_POLL_S = 0.2


@final
class LockedStore:
    """A store that this process has locked; see :class:`nxdt_core.checkpoint.ownership.store_owner.Ownership`."""

    def __init__(self, storage: LockableStorage, lock: StorageLock, me: Owner) -> None:
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
            found = decode_owner(before or self._storage.lock_note(_KEY))
            reason = "its directory was moved or deleted, and another run began to save there"
            raise OwnershipLost(where=self._storage.uri, reason=f"{reason}, {found}" if found else reason)
        self._lock = lock

    def release(self) -> None:
        """Unlock the store, so that another run can take it."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


def lock_store(storage: LockableStorage, me: Owner, *, say: Callable[[str], None], expiry_s: float) -> LockedStore:
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
        fate = "unknown" if holder is None else me.fate_of(holder)
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


def is_locked(storage: LockableStorage, me: Owner) -> bool:
    """Return whether a process has the lock that may still run.

    Raises:
        LocksUnsupported: the file system has no locks.
    """
    note = storage.lock_note(_KEY)
    lock = storage.try_lock(_KEY, note) if note else None  # without a note there has been no owner
    if lock is not None:
        lock.release()
    holder = decode_owner(note)
    return bool(note) and lock is None and (holder is None or me.fate_of(holder) != "gone")
