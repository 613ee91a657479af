"""Owning a store by objects in it, where it has no locks. Torch-free.

::

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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from nxdt_core.checkpoint.commit import greatest_fencing, read_object
from nxdt_core.checkpoint.owner import Owner, decode_owner
from nxdt_core.checkpoint.storage import reason_of
from nxdt_core.errors.checkpoints import OwnershipLost, StorageError, StoreInUse
from nxdt_core.protocols.store import CheckpointStore

_log = logging.getLogger(__name__)

_PREFIX = "owner-"
_KEY = re.compile(_PREFIX + r"([0-9]{8,})\.(json|beat)")
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
        match = _KEY.fullmatch(info.key)
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
