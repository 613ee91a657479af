"""Progress of a preprocessing: blocks of the input files, and a record of those that are written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.files.compressed import UNREADABLE, bare_name, decompressed
from nxdt_core.data.files.paths import JSON_TEXTS
from nxdt_core.errors.data import DataFileUnreadable
from nxdt_core.system.regular_files import read_text, regular_opener, replace_text, replacing
from nxdt_plugin_megatron_data.errors import OtherJob
from nxdt_plugin_megatron_data.indexed_files import Provenance, bin_path, idx_path, provenance_path, write_index

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


_NAMED = 10
"""Number of faults whose descriptions are kept."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """Numbers of what has been read and written."""

    documents: int = 0
    tokens: int = 0
    records: int = 0
    empty: int = 0
    """Records whose text has no token."""
    bad: int = 0
    """Records without text."""
    first_bad: list[str] = field(default_factory=list)
    """The first of them: file, line and reason."""

    def add_fault(self, path: Path, line: int, reason: str) -> None:
        """Count a record without text."""
        self.bad += 1
        if len(self.first_bad) < _NAMED:
            self.first_bad.append(f"{path}:{line}: {reason}")


class Output:
    """The files of an unfinished run: tokens, lengths, and how far they go.

    Args:
        prefix: path of the output, without ``.bin`` and ``.idx``.
        dtype: NumPy dtype of a token id.
        job: digest of what decides the output.

    Raises:
        OtherJob: there is an unfinished run of another job.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any], job: str) -> None:
        self.prefix = prefix
        self.place = Place()
        """Position in the input after what is written."""
        self.counts = Counts()
        self._dtype = dtype
        self._job = job
        self._tokens, self._lengths, self._state = self.unfinished(prefix)
        if self._state.exists() and self._tokens.exists():
            self._resume()
        self._files = [
            open(path, "r+b" if path.exists() else "w+b", opener=regular_opener)  # noqa: SIM115
            for path in (self._tokens, self._lengths)
        ]
        for file, size in zip(self._files, self._sizes(), strict=True):
            file.truncate(size)
            file.seek(size)

    @staticmethod
    def unfinished(prefix: Path) -> tuple[Path, Path, Path]:
        """Return the files of an unfinished run."""
        tokens, lengths, state = (prefix.with_name(f"{prefix.name}{end}") for end in (".bin.part", ".len.part", ".run"))
        return tokens, lengths, state

    def append(self, tokens: bytes, lengths: NDArray[np.int32], end: Place) -> None:
        """Write the tokens of a block that ends at ``end``.

        Raises:
            OSError: of the disk.
        """
        for file, content in zip(self._files, (tokens, lengths.astype("<i4").tobytes()), strict=True):
            file.write(content)
        self.counts.documents += len(lengths)
        self.counts.tokens += len(tokens) // self._dtype.itemsize
        self.place = end

    def save(self) -> None:
        """Make safe what is written, so that a killed run resumes here.

        Raises:
            OSError: of the disk.
        """
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        state = {"job": self._job, "place": asdict(self.place), "counts": asdict(self.counts)}
        with replacing(self._state) as written:
            written.write(json.dumps(state).encode())
            written.flush()
            os.fsync(written.fileno())

    def finish(self, note: Provenance) -> None:
        """Give the files their names. The tokens come last: until then, the run there is unfinished.

        Raises:
            OSError: of the disk.
        """
        self.save()
        self.close()
        with open(self._lengths, "rb", opener=regular_opener) as file:
            lengths = np.fromfile(file, "<i4")
        write_index(idx_path(self.prefix), self._dtype, lengths, np.arange(len(lengths) + 1, dtype=np.int64))
        replace_text(provenance_path(self.prefix), note.text())
        self._tokens.rename(bin_path(self.prefix))
        self._lengths.unlink()
        self._state.unlink()

    def close(self) -> None:
        """Close the files; what was not made safe may be lost, and is written again."""
        for file in self._files:
            file.close()

    def _resume(self) -> None:
        state = json.loads(read_text(self._state))
        if state["job"] != self._job:
            raise OtherJob(path=str(self.prefix))
        self.place = Place(**state["place"])
        self.counts = Counts(**{each.name: state["counts"][each.name] for each in fields(Counts)})

    def _sizes(self) -> tuple[int, int]:
        return self.counts.tokens * self._dtype.itemsize, self.counts.documents * 4
