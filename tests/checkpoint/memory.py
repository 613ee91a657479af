"""A store of checkpoints in memory: the reference that the contract is tested against, and fast in tests."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from nxdt_core.errors.checkpoints import BadStorageKey
from nxdt_core.protocols.store import CheckpointStore, ObjectInfo

__all__ = ["MemoryStorage"]


class MemoryStorage(CheckpointStore):
    """Objects in a dict. Stores with the same ``config``, a dict, are the same store."""

    def __init__(self, uri: str = "memory://", config: Any = None) -> None:
        self.uri = uri
        self.objects: dict[str, tuple[bytes, float]] = {} if config is None else config
        """Key → bytes and time of writing."""
        self._lock = threading.Lock()

    @contextmanager
    def open_write(self, key: str) -> Iterator[BinaryIO]:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        self.check_key(key)
        stream = io.BytesIO()
        yield stream
        with self._lock:
            self.objects[key] = (stream.getvalue(), time.time())

    @contextmanager
    def open_read(self, key: str, start: int = 0, length: int | None = None) -> Iterator[BinaryIO]:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        self.check_key(key)
        if key not in self.objects:
            raise FileNotFoundError(key)
        data = self.objects[key][0]
        yield io.BytesIO(data[start : None if length is None else start + length])

    def stat(self, key: str) -> ObjectInfo | None:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        self.check_key(key)
        if key not in self.objects:
            return None
        data, modified = self.objects[key]
        return ObjectInfo(key=key, size_bytes=len(data), modified=modified)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        for key in sorted(self.objects):
            if key.startswith(prefix):
                data, modified = self.objects[key]
                yield ObjectInfo(key=key, size_bytes=len(data), modified=modified)

    def delete_many(self, keys: Iterable[str]) -> None:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        for key in keys:
            self.check_key(key)
            self.objects.pop(key, None)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        self.check_key(key)
        with self._lock:
            if key in self.objects:
                return False
            self.objects[key] = (bytes(data), time.time())
            return True

    def put_if_match(self, key: str, data: bytes, expected: bytes) -> bool:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        self.check_key(key)
        with self._lock:
            if key not in self.objects or self.objects[key][0] != expected:
                return False
            self.objects[key] = (bytes(data), time.time())
            return True

    def after_commit(self, prefix: str) -> None:
        """Do nothing: objects in memory need no work after a commit."""

    def check_key(self, key: str) -> None:
        """Refuse what the protocol refuses."""
        if any(part in ("", ".", "..") for part in key.split("/")):
            raise BadStorageKey(where=key, reason="it must be names joined by '/', without '..' and empty ones")
