"""A part's buffer as the SDK can send it without copying it.

The SDK takes ``bytes``, which only a copy could give, or a file; the request signer of awscrt copies a ``bytearray``.
"""

from __future__ import annotations

import io
from typing import Any, final

__all__ = ["Body"]


@final
class Body(io.RawIOBase):
    """A file on ``data``."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def readable(self) -> bool:
        """Return True: uploads read it."""
        return True

    def seekable(self) -> bool:
        """Return True: the SDK measures it, and seeks back to send it once more."""
        return True

    def tell(self) -> int:
        """Return the bytes before the next one to be read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a byte."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        self._position = origin + offset
        return self._position

    def read(self, size: int = -1, /) -> Any:
        """Return all that is left as a view, with any ``size``: sockets take a part at once, not by 16 KiB."""
        rest = self._data[self._position :]
        self._position += len(rest)
        return rest

    def readinto(self, buffer: Any, /) -> int:
        """Copy as much as fits."""
        rest = self._data[self._position :][: len(buffer)]
        buffer[: len(rest)] = rest
        self._position += len(rest)
        return len(rest)
