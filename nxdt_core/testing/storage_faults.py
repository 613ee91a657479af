"""A store that fails at a chosen call, to test what is left after a failure at any moment."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, Literal, TypeVar

from nxdt_core.protocols.checkpoint_storage import CheckpointStorage, ObjectInfo

__all__ = ["FaultyStorage", "disk_full"]

When = Literal["before", "after"]
T = TypeVar("T")


def disk_full() -> Exception:
    """What the operating system says when a disk is full."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FaultyStorage:
    """Passes calls on to ``inner`` and raises at the call number ``fail_at`` (from 0).

    Opening, each write, and closing a written object are calls of their own.

    Args:
        inner: the store that does the work.
        fail_at: number of the call that fails; None counts only.
        when: ``before`` the call takes effect, or ``after`` it, as a store does whose answer is lost.
        forever: later calls fail as well.
        error: makes the exception.
    """

    def __init__(
        self,
        inner: CheckpointStorage,
        fail_at: int | None = None,
        *,
        when: When = "before",
        forever: bool = False,
        error: Callable[[], BaseException] = disk_full,
    ) -> None:
        self.uri = inner.uri
        self.calls = 0
        """Calls so far, so that a test knows how many there are to fail."""
        self._inner = inner
        self._fail_at = fail_at
        self._when = when
        self._forever = forever
        self._error = error

    @contextmanager
    def open_write(self, key: str) -> Iterator[BinaryIO]:
        """See :class:`nxdt_core.protocols.checkpoint_storage.CheckpointStorage`."""
        self._call(lambda: None)
        with self._inner.open_write(key) as stream:
            yield _FaultyStream(stream, self._call)  # type: ignore[misc]
            hit = self._hit()
            if hit and self._when == "before":
                raise self._error()
        if hit:
            raise self._error()

    @contextmanager
    def open_read(self, key: str, start: int = 0, length: int | None = None) -> Iterator[BinaryIO]:
        """See :class:`nxdt_core.protocols.checkpoint_storage.CheckpointStorage`."""
        self._call(lambda: None)
        with self._inner.open_read(key, start, length) as stream:
            yield stream

    def stat(self, key: str) -> ObjectInfo | None:
        """See :class:`nxdt_core.protocols.checkpoint_storage.CheckpointStorage`."""
        return self._call(lambda: self._inner.stat(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See :class:`nxdt_core.protocols.checkpoint_storage.CheckpointStorage`."""
        return self._call(lambda: self._inner.list(prefix))

    def delete_many(self, keys: Iterable[str]) -> None:
        """See :class:`nxdt_core.protocols.checkpoint_storage.CheckpointStorage`."""
        self._call(lambda: self._inner.delete_many(keys))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See :class:`nxdt_core.protocols.checkpoint_storage.CheckpointStorage`."""
        return self._call(lambda: self._inner.put_if_absent(key, data))

    def after_commit(self, prefix: str) -> None:
        """See :class:`nxdt_core.protocols.checkpoint_storage.CheckpointStorage`."""
        self._call(lambda: self._inner.after_commit(prefix))

    def _hit(self) -> bool:
        """Count a call; True where it is one that fails."""
        number, self.calls = self.calls, self.calls + 1
        if self._fail_at is None:
            return False
        return number == self._fail_at or (self._forever and number > self._fail_at)

    def _call(self, action: Callable[[], T]) -> T:
        hit = self._hit()
        if hit and self._when == "before":
            raise self._error()
        result = action()
        if hit:
            raise self._error()
        return result


class _FaultyStream:
    """A stream whose every write is a call."""

    def __init__(self, stream: BinaryIO, call: Callable[[Callable[[], int]], int]) -> None:
        self._stream = stream
        self._call = call

    def write(self, data: bytes) -> int:
        """Write ``data``."""
        return self._call(lambda: self._stream.write(data))
