"""Files that may be compressed: gzip and Zstandard, recognised by their suffixes."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from nxdt_core.errors.data import DataLibraryMissing
from nxdt_core.system.regular_files import require_fetched

if TYPE_CHECKING:
    from typing_extensions import Buffer

COMPRESSED = (".gz", ".zst")
"""Endings of compressed files."""

UNREADABLE = (OSError, EOFError, zlib.error)
"""Exceptions of reading a file that is incomplete or not readable."""

_CHUNK_BYTES = 1 << 17
_PACKED_BYTES = 1 << 11
"""Bytes that are decompressed at once: at most 64 MiB come of them, since 4 bytes can stand for 128 KiB."""


def bare_name(path: Path) -> str:
    """Return the name without the suffix of a compression, in lower case: what is left has the suffix of the format."""
    name, ending = path.name.lower(), path.suffix.lower()
    return name.removesuffix(ending) if ending in COMPRESSED else name


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed.

    Raises:
        UNREADABLE: no permission, an error of the disk, a Git LFS pointer, or damaged data; also while it is read.
    """
    require_fetched(path)
    with path.open("rb") as raw, decompressed(path, raw) as file:
        yield file


def decompressed(path: Path, raw: IO[bytes]) -> IO[bytes]:
    """Return the content of ``raw``, the bytes of ``path`` on the disk; ``raw`` itself where they are not compressed.

    Raises:
        DataLibraryMissing: it is of Zstandard, and the library is not installed.
    """
    if path.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if path.suffix.lower() == ".zst":
        try:
            return io.BufferedReader(ZstdFile(raw))
        except ImportError as error:
            raise DataLibraryMissing(path=str(path), package="zstandard", extra="zstd", reason=str(error)) from error
    return raw


class BadZstdFile(OSError):
    """A damaged file, or one of another format; as :class:`gzip.BadGzipFile`."""


class ZstdFile(io.RawIOBase):
    """The decompressed bytes of ``raw``, a Zstandard file of any number of frames, as a readable file.

    A file that was cut off is an error. (The library's own reader takes its end for the end of the text.)

    Raises:
        ImportError: the library is not installed.
        EOFError: on reading: the file ends within a frame.
        BadZstdFile: on reading: it is damaged, or no Zstandard file.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        import zstandard

        self._library: Any = zstandard
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
            self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(packed[:_PACKED_BYTES]))
            except self._library.ZstdError as error:
                raise BadZstdFile(str(error)) from error
            self._packed = self._frame.unused_data + packed[_PACKED_BYTES:]
            if self._frame.eof:
                self._frame = None
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
