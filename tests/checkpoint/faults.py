"""A store that fails at a chosen call, to test what is left after a failure at any moment."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, Literal, TypeVar

from nxdt_core.protocols.store import CheckpointStore, ObjectInfo

__all__ = ["FaultyStorage", "When", "disk_full"]

When = Literal["before", "during", "after"]
T = TypeVar("T")


def disk_full() -> Exception:
    """Return what the operating system says when a disk is full."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FaultyStorage(CheckpointStore):
    """Passes calls on to ``inner`` and raises at the call number ``fail_at`` (from 0).

    Opening, each write, and closing a written object are separate calls.

    Args:
        inner: the store that does the work.
        fail_at: number of the call that fails; None counts only.
        when: ``before`` the call takes effect; ``during`` it, so that only the first half of a write arrives;
            or ``after`` it, as when the answer of a store is lost.
        forever: later calls fail as well.
        error: makes the exception. It may take its time; where it returns None, the call continues normally.
    """

    def __init__(
        self,
        inner: CheckpointStore,
        fail_at: int | None = None,
        *,
        when: When = "before",
        forever: bool = False,
        error: Callable[[], BaseException | None] = disk_full,
    ) -> None:
        self.uri = inner.uri
        self.inner = inner
        """The store that does the work."""
        self.strike(fail_at, when=when, forever=forever, error=error)

    def strike(
        self,
        fail_at: int | None = None,
        *,
        when: When = "before",
        forever: bool = False,
        error: Callable[[], BaseException | None] = disk_full,
    ) -> None:
        """Count from 0 again, and from now on fail as the arguments say; they are those of the class."""
        self.history: list[str] = []
        """Descriptions of the calls so far, so that a test knows how many there are to fail, and which."""
        self._fail_at = fail_at
        self._when = when
        self._forever = forever
        self._error = error

    @property
    def calls(self) -> int:
        """How many calls there were."""
        return len(self.history)

    @contextmanager
    def open_write(self, key: str) -> Iterator[BinaryIO]:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        self._call(f"open {key}", lambda: None)
        with self.inner.open_write(key) as stream:
            yield _FaultyStream(stream, key, self._call)  # type: ignore[misc]
            hit = self._hit(f"close {key}")
            if hit and self._when == "before":
                self._fail()
        if hit and self._when != "before":
            self._fail()

    @contextmanager
    def open_read(self, key: str, start: int = 0, length: int | None = None) -> Iterator[BinaryIO]:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        self._call(f"read {key}", lambda: None)
        with self.inner.open_read(key, start, length) as stream:
            yield stream

    def stat(self, key: str) -> ObjectInfo | None:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        return self._call(f"stat {key}", lambda: self.inner.stat(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        return iter(self._call(f"list {prefix}", lambda: tuple(self.inner.list(prefix))))

    def delete_many(self, keys: Iterable[str]) -> None:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        chosen = tuple(keys)
        first = tuple(chosen[: len(chosen) // 2])
        self._call(
            f"delete {len(chosen)}", lambda: self.inner.delete_many(chosen), lambda: self.inner.delete_many(first)
        )

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`. It is atomic ``during``, too."""
        return self._call(f"put {key}", lambda: self.inner.put_if_absent(key, data))

    def put_if_match(self, key: str, data: bytes, expected: bytes) -> bool:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`. It is atomic ``during``, too."""
        return self._call(f"replace {key}", lambda: self.inner.put_if_match(key, data, expected))

    def after_commit(self, prefix: str) -> None:
        """See :class:`nxdt_core.protocols.store.CheckpointStore`."""
        self._call(f"after_commit {prefix}", lambda: self.inner.after_commit(prefix))

    def _hit(self, call: str) -> bool:
        """Note a call; True where it is one that fails."""
        number = len(self.history)
        self.history.append(call)
        if self._fail_at is None:
            return False
        return number == self._fail_at or (self._forever and number > self._fail_at)

    def _call(self, call: str, action: Callable[[], T], half: Callable[[], T] | None = None) -> T:
        hit = self._hit(call)
        if hit and self._when == "before":
            self._fail()
        result = half() if hit and half is not None and self._when == "during" else action()
        if hit and self._when != "before":
            self._fail()
        return result

    def _fail(self) -> None:
        error = self._error()
        if error is not None:
            raise error


class _FaultyStream:
    """A stream whose every write is a call."""

    def __init__(
        self, stream: BinaryIO, key: str, call: Callable[[str, Callable[[], int], Callable[[], int]], int]
    ) -> None:
        self._stream = stream
        self._key = key
        self._call = call

    def write(self, data: bytes) -> int:
        """Write ``data``; a planned fault fails before it, or after its first half."""
        first = data[: len(data) // 2]
        return self._call(f"write {self._key}", lambda: self._stream.write(data), lambda: self._stream.write(first))
