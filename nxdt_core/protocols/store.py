"""Kind ``store``: moves bytes under keys and knows nothing of tensors. Torch-free.

A key is a relative path of ``/``-separated parts, such as ``step-00000100/manifest.json``; ``..``, empty
parts and a leading ``/`` are refused. A store that fails raises :class:`nxdt_core.errors.checkpoints.StorageError` or a
subclass for what the user can fix, and ``OSError`` otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from nxdt_core.system.file_lock import LocksUnsupported

__all__ = ["CheckpointStore", "LocksUnsupported", "ObjectInfo", "StorageLock"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object of a store."""

    key: str
    size_bytes: int
    modified: float
    """Seconds since the epoch, by the store's clock."""


class StorageLock(Protocol):
    """A lock that is held until :meth:`release`, or until this process is dead, however it dies."""

    def held(self) -> bool:
        """Return whether it still keeps others out. It does not once its file was moved away or replaced."""

    def release(self) -> None:
        """Let others have it; may be called twice, and does nothing in a forked child."""


class CheckpointStore(ABC):
    """The target of the kind, called as ``Target(uri, config)``; ``config`` is the section ``checkpoint.storage``.

    All methods may be called from several threads and processes at once.
    """

    uri: str
    """The root, as the user wrote it, normalised."""

    def __init__(self, uri: str, config: Any = None) -> None:
        self.uri = uri

    @abstractmethod
    def open_write(self, key: str) -> AbstractContextManager[BinaryIO]:
        """Stream an object. It becomes visible, whole and durable, when the block ends without an exception;
        after an exception nothing of it is visible. An object that exists is replaced."""

    @abstractmethod
    def open_read(self, key: str, start: int = 0, length: int | None = None) -> AbstractContextManager[BinaryIO]:
        """Stream the bytes ``[start, start + length)``, to the end where ``length`` is None.

        Raises:
            FileNotFoundError: no such key.
        """

    @abstractmethod
    def stat(self, key: str) -> ObjectInfo | None:
        """Return the object's facts, or None where there is no such key."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects whose key starts with ``prefix``, sorted by key; unfinished writes do not show."""

    @abstractmethod
    def delete_many(self, keys: Iterable[str]) -> None:
        """Delete the objects; keys that do not exist are not an error."""

    @abstractmethod
    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create an object in one atomic, durable step unless the key exists.

        Returns:
            True when this call created it, False when it existed before.
        """

    @abstractmethod
    def put_if_match(self, key: str, data: bytes, expected: bytes) -> bool:
        """Replace a small object in one atomic, durable step if its bytes are ``expected`` at that moment.

        Returns:
            True when this call replaced it; False, with nothing changed, when it holds other bytes or does not exist.
        """

    def after_commit(self, prefix: str) -> None:
        """Called once after the manifest under ``prefix`` is committed; most stores do nothing."""

    def try_lock(self, key: str, note: bytes) -> StorageLock | None:
        """Take a lock of the operating system without waiting. It is not an object, and no listing shows it.

        Args:
            key: name of the lock, one part.
            note: what :meth:`lock_note` returns to processes that do not get the lock.

        Returns:
            The lock; None if another owner holds it, in this process or in any other.

        Raises:
            LocksUnsupported: the store has no locks that every process sees; the default.
        """
        raise LocksUnsupported

    def lock_note(self, key: str) -> bytes:
        """Return the note of the last owner; empty if there was no owner, or if it has not written its note yet."""
        return b""

    def archive_state(self, prefix: str) -> str:
        """Return in a few words how far the objects under ``prefix`` are copied elsewhere. Default: empty, as of a
        store that has no such copies."""
        return ""
