"""Input files as blocks of whole records, from any place on: plain, gzip and Zstandard, JSON lines and text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nxdt_core.data.files.compressed import UNREADABLE, bare_name, decompressed
from nxdt_core.data.files.paths import JSON_TEXTS
from nxdt_core.errors.data import DataFileUnreadable

__all__ = ["Block", "Place", "is_json", "read_blocks"]

_BLOCK_BYTES = 1 << 20
"""Long enough that sending it to another process costs little, short enough that all of them finish together."""
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A border between two records."""

    file: int = 0
    """Number of the file among the inputs."""
    offset: int = 0
    """Number of decompressed bytes of the file before the border."""
    line: int = 1
    """Number of the line that begins at the border."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Whole records."""

    begin: Place
    content: bytes
    end: Place
    disk_bytes: int
    """Bytes of the files, as stored on disk, that were read up to its end."""


def is_json(path: Path) -> bool:
    """Return whether a file has an object per line; others are text."""
    return bare_name(path).endswith(JSON_TEXTS)


def read_blocks(files: Sequence[Path], start: Place, separator: bytes | None) -> Iterator[Block]:
    """Yield the blocks of the ``files`` in their order, from ``start`` on.

    Args:
        files: the inputs.
        start: the end of a block, or the very beginning.
        separator: separates documents in a text file; None: each text file is one document.

    Raises:
        DataFileUnreadable: no permission, an error of the disk, or damaged compressed data.
    """
    before = sum(path.stat().st_size for path in files[: start.file])
    for number, path in enumerate(files[start.file :], start=start.file):
        place = start if number == start.file else Place(file=number)
        try:
            yield from _of_file(path, place, b"\n" if is_json(path) else separator, before)
        except UNREADABLE as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DataFileUnreadable(path=str(path), reason=reason) from error
        before += path.stat().st_size


def _of_file(path: Path, place: Place, separator: bytes | None, before: int) -> Iterator[Block]:
    with ExitStack() as stack:
        raw = stack.enter_context(path.open("rb"))
        file = stack.enter_context(decompressed(path, raw))
        _skip(file, place.offset, seekable=file is raw)
        for content in _whole_records(file, separator):
            block = _block(place, content, before + raw.tell())
            yield block
            place = block.end


def _whole_records(file: IO[bytes], separator: bytes | None) -> Iterator[bytes]:
    """The rest of a file in parts that end with ``separator``, but for the last.

    Separators are found from the left, as in the parts later: of three newlines, the first two are one.
    """
    rest = b""
    while chunk := file.read(_BLOCK_BYTES if separator else -1):
        read = rest + chunk
        rest = read.split(separator)[-1] if separator else read
        if whole := len(read) - len(rest):
            yield read[:whole]
    if rest:
        yield rest


def _block(begin: Place, content: bytes, disk_bytes: int) -> Block:
    end = Place(file=begin.file, offset=begin.offset + len(content), line=begin.line + content.count(b"\n"))
    return Block(
        begin=begin,
        content=content.removeprefix(_BOM) if not begin.offset else content,
        end=end,
        disk_bytes=disk_bytes,
    )


def _skip(file: IO[bytes], offset: int, *, seekable: bool) -> None:
    if seekable:
        file.seek(offset)
        return
    while offset:
        offset -= len(file.read(min(offset, _BLOCK_BYTES))) or offset
