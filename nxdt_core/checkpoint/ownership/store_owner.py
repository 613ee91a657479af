"""One run at a time saves to a store: it owns the store from its start to its end. Torch-free.

By a lock of the operating system where the store has one, else by a lease. Readers need neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from nxdt_core.checkpoint.os_errors import explained_os_errors
from nxdt_core.checkpoint.ownership.flock import is_locked, lock_store
from nxdt_core.checkpoint.ownership.lease import is_leased, take_lease
from nxdt_core.checkpoint.ownership.owner import Owner, this_process
from nxdt_core.protocols.store import CheckpointStore, LockableStorage, LocksUnsupported

__all__ = ["Ownership", "is_owned", "own", "owned"]

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
        if isinstance(storage, LockableStorage):
            try:
                return lock_store(storage, me, say=say, expiry_s=expiry_s)
            except LocksUnsupported as error:
                say(f"{storage.uri} is owned by a lease instead of a lock: {error.strerror}")
        return take_lease(storage, me, say=say, expiry_s=expiry_s)


@contextmanager
def owned(
    storage: CheckpointStore, *, run: str, say: Callable[[str], None], expiry_s: float = EXPIRY_S
) -> Iterator[Ownership]:
    """:func:`own` for a block: what a command does that changes a store."""
    ownership = own(storage, run=run, say=say, expiry_s=expiry_s)
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
        if isinstance(storage, LockableStorage):
            with suppress(LocksUnsupported):
                if is_locked(storage, me):
                    return True
        return is_leased(storage, me)
