"""Reads Zstandard files of any number of frames; one that was cut off is an error. (The library's own reader takes the
end of the file for the end of the text.)"""

from __future__ import annotations

import io
from typing import IO, TYPE_CHECKING, Any

import zstandard

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["BadZstdFile", "ZstdFile"]

_CHUNK_BYTES = 1 << 17
_PACKED_BYTES = 1 << 11
"""Bytes that are decompressed at once: at most 64 MiB come of them, since 4 bytes can stand for 128 KiB."""


class BadZstdFile(OSError):
    """A damaged file, or one of another format; as :class:`gzip.BadGzipFile`."""


class ZstdFile(io.RawIOBase):
    """The decompressed bytes of ``raw``, as a readable file.

    Raises:
        EOFError: on reading: the file ends within a frame.
        BadZstdFile: on reading: it is damaged, or no Zstandard file.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._frame: Any = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Return True: the file can be read."""
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill ``buffer`` with decompressed bytes and return how many; 0 at the end."""
        while not self._ready:
            packed = self._packed or self._raw.read(_CHUNK_BYTES)
            if not packed and self._frame is not None:
                raise EOFError("it ends in the middle")
            if not packed:
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(packed[:_PACKED_BYTES]))
            except zstandard.ZstdError as error:
                raise BadZstdFile(str(error)) from error
            self._packed = self._frame.unused_data + packed[_PACKED_BYTES:]
            if self._frame.eof:
                self._frame = None
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
