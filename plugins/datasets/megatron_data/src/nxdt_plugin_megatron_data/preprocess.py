"""``nxdt data preprocess``: texts become ``.bin/.idx``, and the caller sees its progress.

One process reads blocks of whole records, others tokenise them, and the first appends what comes back, in the order of
the input. What is written up to a block is made safe every few seconds, so that a killed run resumes after it. The
files are bitwise the same as without.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, fields
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.cache import SAMPLED_FROM_BYTES, digest, file_digest
from nxdt_core.data.files.compressed import UNREADABLE, bare_name, decompressed
from nxdt_core.data.files.paths import JSON_TEXTS, check_utf8_start, read_bytes
from nxdt_core.errors.data import DataFileUnreadable
from nxdt_core.protocols.store import LocksUnsupported
from nxdt_core.system.file_lock import take_file_lock
from nxdt_core.system.regular_files import read_text, regular_opener, replace_text, replacing
from nxdt_plugin_megatron_data.encoding import (
    Encoded,
    NamedTokenizer,
    TokenizationOptions,
    encode_here,
    start_worker,
)
from nxdt_plugin_megatron_data.errors import (
    InputInTheWay,
    NoDocuments,
    NoEndToken,
    NoRoom,
    OtherJob,
    OutputExists,
    OutputTaken,
    OutputUnwritable,
    TooManyBadRecords,
    WorkerDied,
)
from nxdt_plugin_megatron_data.indexed_files import (
    Provenance,
    bin_path,
    dtype_for,
    idx_path,
    provenance_path,
    write_index,
)

_AHEAD_PER_WORKER = 3
"""Blocks that are read before their turn: each process finds its next one ready."""
_CHECKED_FROM = 1000
"""Records after which their bad ones may stop a run before its end."""
_HEAD_BYTES = 4096
"""Bytes read to detect UTF-16 and UTF-32, in which records cannot be found."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BLOCK_BYTES = 1 << 20
"""Long enough that sending it to another process costs little, short enough that all of them finish together."""
_BOM = b"\xef\xbb\xbf"
_NAMED = 10
"""Number of faults whose descriptions are kept."""


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
        end_of_record = b"\n" if is_json(path) else separator
        try:
            with ExitStack() as stack:
                raw = stack.enter_context(path.open("rb"))
                file = stack.enter_context(decompressed(path, raw))
                left = place.offset
                if file is raw:
                    file.seek(left)
                while left and file is not raw:
                    left -= len(file.read(min(left, _BLOCK_BYTES))) or left
                # Separators are found from the left, as in the parts later: of three newlines, the first two are one.
                rest, chunk = b"", b"-"
                while chunk:
                    chunk = file.read(_BLOCK_BYTES if end_of_record else -1)
                    read = rest + chunk
                    rest = b"" if not chunk else read.split(end_of_record)[-1] if end_of_record else read
                    if content := read[: len(read) - len(rest)]:
                        offset, lines = place.offset + len(content), place.line + content.count(b"\n")
                        end = Place(file=number, offset=offset, line=lines)
                        text = content if place.offset else content.removeprefix(_BOM)
                        yield Block(begin=place, content=text, end=end, disk_bytes=before + raw.tell())
                        place = end
        except UNREADABLE as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DataFileUnreadable(path=str(path), reason=reason) from error
        before += path.stat().st_size


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
            state = json.loads(read_text(self._state))
            if state["job"] != self._job:
                raise OtherJob(path=str(self.prefix))
            self.place = Place(**state["place"])
            self.counts = Counts(**{count.name: state["counts"][count.name] for count in fields(Counts)})
        self._files = [
            open(path, "r+b" if path.exists() else "w+b", opener=regular_opener)  # noqa: SIM115
            for path in (self._tokens, self._lengths)
        ]
        sizes = self.counts.tokens * self._dtype.itemsize, self.counts.documents * 4
        for file, size in zip(self._files, sizes, strict=True):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Inputs and outputs of one run."""

    files: tuple[Path, ...]
    prefix: Path
    tokenizer: NamedTokenizer
    recipe: TokenizationOptions
    workers: int
    max_bad_share: float
    save_every_s: float
    overwrite: bool = False
    shard: tuple[int, int] = (1, 1)
    """Number of the part to write, from 1, and of all parts."""


def preprocess(job: Job, watch: Callable[[int, Counts], None]) -> tuple[Counts, int]:
    """Do the job, or the rest of it; return the counts, and how many of the tokens an unfinished run had written.

    Args:
        job: see there.
        watch: receives the bytes of the files, as stored on disk, that are done, and the counts.

    Raises:
        OutputExists, InputInTheWay, OtherJob, OutputTaken: of the prefix.
        TooManyBadRecords, NoDocuments, DataFileUnreadable: of the input.
        NoRoom, WorkerDied: of the machine.
        NoEndToken: the tokenizer has no end-of-text token to append.
    """
    tokenizer = job.tokenizer.build()
    if job.recipe.append_eod and tokenizer.eos_id is None:
        raise NoEndToken(tokenizer=job.tokenizer.label)
    note = Provenance(
        tokenizer=job.tokenizer.label,
        fingerprint=tokenizer.fingerprint(),
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eos_id if job.recipe.append_eod else None,
        inputs=tuple(map(str, job.files)),
    )
    decides = digest(
        *map(_content, job.files), note.fingerprint, job.recipe, *([job.shard] if job.shard[1] > 1 else [])
    )
    with write_errors_explained(job.prefix, lambda: 0):
        job.prefix.parent.mkdir(parents=True, exist_ok=True)
    with write_errors_explained(job.prefix, lambda: 0), _alone(job.prefix):
        unfinished, outputs = Output.unfinished(job.prefix), (bin_path(job.prefix), idx_path(job.prefix))
        written = (*unfinished, *outputs, provenance_path(job.prefix))
        for path in written:
            if path.exists() and any(path.samefile(file) for file in job.files):
                raise InputInTheWay(path=str(path))
        for path in written if job.overwrite else ():
            path.unlink(missing_ok=True)
        for path in outputs:
            if path.exists() and not unfinished[0].exists():
                raise OutputExists(path=str(path))
        output = Output(job.prefix, dtype_for(note.vocab_size), decides)
        before = output.counts.tokens
        with write_errors_explained(job.prefix, lambda: output.counts.tokens), closing(output):
            separator = job.recipe.separator
            for path in job.files:
                check_utf8_start(path, read_bytes(path, _HEAD_BYTES))
            blocks = _of_shard(job, output.place, separator.encode() if separator else None)
            saved = time.monotonic()
            for block, encoded in _encoded(blocks, job):
                path, counts = job.files[block.begin.file], output.counts
                for line, reason in encoded.faults:
                    counts.bad += 1
                    if len(counts.first_bad) < _NAMED:
                        counts.first_bad.append(f"{path}:{block.begin.line + line}: {reason}")
                counts.records += encoded.records
                counts.empty += encoded.empty
                output.append(encoded.tokens, encoded.lengths, block.end)
                watch(block.disk_bytes, counts)
                if time.monotonic() - saved >= job.save_every_s:
                    output.save()
                    saved = time.monotonic()
                _check_bad_share(output, job.max_bad_share, at_least=_CHECKED_FROM)
            _check_bad_share(output, job.max_bad_share, at_least=1)
            if not output.counts.documents and job.shard[1] == 1:  # a part of a small input may have none
                raise NoDocuments(files=len(job.files), records=output.counts.records)
            output.finish(note)
    return output.counts, before


def _content(path: Path) -> str:
    """Return a digest of a file's content; a change outside the blocks of a large file shows by its time."""
    try:
        status = path.stat()
        blocks = file_digest(path)
        return blocks if status.st_size <= SAMPLED_FROM_BYTES else digest(blocks, status.st_mtime_ns)
    except OSError as error:
        raise DataFileUnreadable(path=str(path), reason=error.strerror or str(error)) from error


def _of_shard(job: Job, start: Place, separator: bytes | None) -> Iterator[Block]:
    """Yield the blocks of the job's part from ``start`` on: those whose ends on the disk are in its range of bytes.

    Which blocks there are depends on where reading begins, so that each part reads from the beginning."""
    number, count = job.shard
    if count == 1:
        yield from read_blocks(job.files, start, separator)
        return
    size = sum(path.stat().st_size for path in job.files)
    for block in read_blocks(job.files, Place(), separator):
        owner = min(count, 1 + max(0, block.disk_bytes - 1) * count // max(1, size))
        if owner > number:
            return
        if owner == number and (block.begin.file, block.begin.offset) >= (start.file, start.offset):
            yield block


def _encoded(blocks: Iterator[Block], job: Job) -> Iterator[tuple[Block, Encoded]]:
    """Blocks and what became of them, in the order of the blocks, whichever process is done first."""
    pool = ProcessPoolExecutor(
        job.workers, get_context("spawn"), initializer=start_worker, initargs=(job.tokenizer, job.recipe)
    )
    begun: deque[tuple[Block, Future[Encoded]]] = deque()
    others = active_children()
    try:
        for block in blocks:
            json_lines = is_json(job.files[block.begin.file])
            try:
                begun.append((block, pool.submit(encode_here, block.content, json_lines)))
            except OSError as error:
                if error.errno is not None:
                    raise
                # CPython: the pool's pipe was closed, because a worker died, after `submit` had seen that it is whole.
                raise BrokenProcessPool(str(error)) from error
            if len(begun) > _AHEAD_PER_WORKER * job.workers:
                first, future = begun.popleft()
                yield first, future.result()
        for block, future in begun:
            yield block, future.result()
    except BrokenProcessPool as error:
        # The pool ends its processes, but not one that it was just starting, for which its end would wait forever.
        for process in active_children():
            if process not in others:
                process.kill()
        raise WorkerDied() from error
    finally:
        pool.shutdown(cancel_futures=True)


def _check_bad_share(output: Output, share: float, *, at_least: int) -> None:
    counts = output.counts
    if counts.bad > share * counts.records and counts.records >= at_least:
        output.save()
        first = tuple(counts.first_bad)
        raise TooManyBadRecords(bad=counts.bad, records=counts.records, share=share, first=first)


@contextmanager
def write_errors_explained(prefix: Path, tokens: Callable[[], int]) -> Iterator[None]:
    """Return an error that explains why the operating system refuses a write."""
    try:
        yield
    except OSError as error:
        path, reason = str(bin_path(prefix)), error.strerror or str(error)
        if error.errno in _FULL:
            raise NoRoom(path=path, tokens=tokens(), reason=reason) from error
        raise OutputUnwritable(path=path, reason=reason) from error


@contextmanager
def _alone(prefix: Path) -> Iterator[None]:
    """Keep other processes from writing the same files, where the file system has locks."""
    path = prefix.with_name(f"{prefix.name}.lock")
    try:
        lock = take_file_lock(path, f"process {os.getpid()}".encode())
    except LocksUnsupported:
        yield
        return
    if lock is None:
        raise OutputTaken(path=str(bin_path(prefix)), note=read_text(path, errors="replace"))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
