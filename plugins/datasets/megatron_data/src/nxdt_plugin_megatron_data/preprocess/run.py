"""``nxdt data preprocess``: texts become ``.bin/.idx``, and the caller sees its progress.

One process reads blocks of whole records, others tokenise them, and the first appends what comes back, in the order of
the input. What is written up to a block is made safe every few seconds, so that a killed run resumes after it. The
files are bitwise the same as without.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path

from nxdt_core.data.cache import SAMPLED_FROM_BYTES, digest, file_digest
from nxdt_core.data.files.encodings import check_utf8_start
from nxdt_core.data.files.paths import read_bytes
from nxdt_core.errors.data import DataFileUnreadable
from nxdt_core.protocols.store import LocksUnsupported
from nxdt_core.system.file_lock import take_file_lock
from nxdt_core.system.regular_files import read_text
from nxdt_plugin_megatron_data.errors import (
    InputInTheWay,
    NoDocuments,
    NoEndToken,
    NoRoom,
    OutputExists,
    OutputTaken,
    OutputUnwritable,
    TooManyBadRecords,
    WorkerDied,
)
from nxdt_plugin_megatron_data.indexed_files import Provenance, bin_path, dtype_for, idx_path, provenance_path
from nxdt_plugin_megatron_data.preprocess.progress import Block, Counts, Output, Place, is_json, read_blocks
from nxdt_plugin_megatron_data.preprocess.records import Encoded, TokenizationOptions, encode_here, start_worker
from nxdt_plugin_megatron_data.preprocess.tokenizers import NamedTokenizer

_AHEAD_PER_WORKER = 3
"""Blocks that are read before their turn: each process finds its next one ready."""
_CHECKED_FROM = 1000
"""Records after which their bad ones may stop a run before its end."""
_HEAD_BYTES = 4096
"""Bytes read to detect UTF-16 and UTF-32, in which records cannot be found."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a preprocessing."""

    counts: Counts
    tokens_before: int
    """Tokens of them that an earlier, unfinished run had written."""
    seconds: float
    """Duration of this run."""


def preprocess(job: Job, watch: Callable[[int, Counts], None]) -> Outcome:
    """Do the job, or the rest of it.

    Args:
        job: see there.
        watch: receives the bytes of the files, as stored on disk, that are done, and the counts.

    Raises:
        OutputExists, InputInTheWay, OtherJob, OutputTaken: of the prefix.
        TooManyBadRecords, NoDocuments, DataFileUnreadable: of the input.
        NoRoom, WorkerDied: of the machine.
        NoEndToken: the tokenizer has no end-of-text token to append.
    """
    began = time.monotonic()
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
        _clear(job)
        output = Output(job.prefix, dtype_for(note.vocab_size), decides)
        before = output.counts.tokens
        with write_errors_explained(job.prefix, lambda: output.counts.tokens), closing(output):
            _write_all(job, output, watch)
            _check_bad_share(output, job.max_bad_share, at_least=1)
            if not output.counts.documents and job.shard[1] == 1:  # a part of a small input may have none
                raise NoDocuments(files=len(job.files), records=output.counts.records)
            output.finish(note)
    return Outcome(counts=output.counts, tokens_before=before, seconds=time.monotonic() - began)


def _content(path: Path) -> str:
    """Return a digest of a file's content; a change outside the blocks of a large file shows by its time."""
    try:
        found = path.stat()
        blocks = file_digest(path)
        return blocks if found.st_size <= SAMPLED_FROM_BYTES else digest(blocks, found.st_mtime_ns)
    except OSError as error:
        raise DataFileUnreadable(path=str(path), reason=error.strerror or str(error)) from error


def _write_all(job: Job, output: Output, watch: Callable[[int, Counts], None]) -> None:
    separator = job.recipe.separator
    for path in job.files:
        check_utf8_start(path, read_bytes(path, _HEAD_BYTES))
    blocks = _of_shard(job, output.place, separator.encode() if separator else None)
    saved = time.monotonic()
    for block, encoded in _encoded(blocks, job):
        path, counts = job.files[block.begin.file], output.counts
        for fault in encoded.faults:
            counts.add_fault(path, block.begin.line + fault.line, fault.reason)
        counts.records += encoded.records
        counts.empty += encoded.empty
        output.append(encoded.tokens, encoded.lengths, block.end)
        watch(block.disk_bytes, counts)
        if time.monotonic() - saved >= job.save_every_s:
            output.save()
            saved = time.monotonic()
        _check_bad_share(output, job.max_bad_share, at_least=_CHECKED_FROM)


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
            begun.append((block, _submitted(pool, block, json_lines)))
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


def _submitted(pool: ProcessPoolExecutor, block: Block, json_lines: bool) -> Future[Encoded]:
    try:
        return pool.submit(encode_here, block.content, json_lines)
    except OSError as error:
        if error.errno is not None:
            raise
        # CPython: the pool's pipe was closed, because a worker died, after `submit` had checked that it is whole.
        raise BrokenProcessPool(str(error)) from error


def _check_bad_share(output: Output, share: float, *, at_least: int) -> None:
    counts = output.counts
    if counts.bad > share * counts.records and counts.records >= at_least:
        output.save()
        first = tuple(counts.first_bad)
        raise TooManyBadRecords(bad=counts.bad, records=counts.records, share=share, first=first)


def _clear(job: Job) -> None:
    """Refuse existing files, or remove them."""
    unfinished, outputs = Output.unfinished(job.prefix), (bin_path(job.prefix), idx_path(job.prefix))
    written = (*unfinished, *outputs, provenance_path(job.prefix))
    for path in written:
        if path.exists() and any(path.samefile(each) for each in job.files):
            raise InputInTheWay(path=str(path))
    if job.overwrite:
        for path in written:
            path.unlink(missing_ok=True)
        return
    resumes = unfinished[0].exists()
    for path in outputs:
        if path.exists() and not resumes:
            raise OutputExists(path=str(path))


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
