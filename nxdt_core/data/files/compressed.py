"""Files that may be compressed: gzip and Zstandard, recognised by their suffixes."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from nxdt_core.errors.data import DataLibraryMissing
from nxdt_core.system.regular_files import require_fetched

__all__ = ["COMPRESSED", "UNREADABLE", "bare_name", "decompressed", "is_compressed", "opened"]

COMPRESSED = (".gz", ".zst")
"""Endings of compressed files."""

UNREADABLE = (OSError, EOFError, zlib.error)
"""Exceptions of reading a file that is incomplete or not readable."""


def bare_name(path: Path) -> str:
    """Return the name without the suffix of a compression, in lower case: what is left has the suffix of the format."""
    name = path.name.lower()
    return name.removesuffix(_ending(path)) if is_compressed(path) else name


def is_compressed(path: Path) -> bool:
    """Return whether the name of a file says that it is compressed."""
    return _ending(path) in COMPRESSED


def _ending(path: Path) -> str:
    return path.suffix.lower()


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
    if _ending(path) == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if _ending(path) == ".zst":
        try:
            from nxdt_core.data.files.zstd import ZstdFile
        except ImportError as error:
            raise DataLibraryMissing(path=str(path), package="zstandard", extra="zstd", reason=str(error)) from error
        return io.BufferedReader(ZstdFile(raw))
    return raw
