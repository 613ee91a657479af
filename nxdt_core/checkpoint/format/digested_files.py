"""Files with digests next to them: written in one stream, read by ranges whose blocks are verified. Torch-free.

Headers of shards are compared with the manifest here. A manifest finds a tensor's bytes without opening a shard, and
the shard's own header says the same for every reader of safetensors. Where the two differ one of them was changed, and
the bytes would be taken for another tensor.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import BinaryIO

from nxdt_core.checkpoint.format.file_names import digests_name
from nxdt_core.checkpoint.format.manifest import FAST, HASHES, Algorithm, FileEntry, Manifest, digest
from nxdt_core.checkpoint.format.tensor_index import DTYPES, ITEM_BYTES
from nxdt_core.errors.checkpoints import CheckpointDamaged
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.system.progress import PROGRESS

BLOCK_BYTES = 8 * 2**20
"""Bytes that one digest covers."""

_WORTH_A_THREAD_BYTES = 2**20


_MOST_DIGESTS_BYTES = 64 * 2**20
"""Digests of 15 TB; what claims more is forged, and must not have the memory that it asks for."""
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100 * 2**20
"""Longest header that the safetensors library accepts; a longer one is forged, and must not get the memory it asks
for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDigests:
    """The digests of the blocks of one file; the last block may be short."""

    size_bytes: int
    blocks: tuple[str, ...]
    block_bytes: int = BLOCK_BYTES
    algorithm: Algorithm = FAST

    def encode(self) -> bytes:
        """Return the bytes that are stored next to the file."""
        table = {
            "algorithm": self.algorithm,
            "block_bytes": self.block_bytes,
            "size_bytes": self.size_bytes,
            "blocks": self.blocks,
        }
        return json.dumps(table, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> BlockDigests:
        """Return the digests from bytes of :meth:`encode`.

        Raises:
            ValueError: ``data`` is something else.
        """
        try:
            table = json.loads(data)
            if table["algorithm"] not in HASHES:
                raise ValueError(f"algorithm {table['algorithm']!r} is not known")
            digests = cls(
                size_bytes=int(table["size_bytes"]),
                blocks=tuple(str(block) for block in table["blocks"]),
                block_bytes=int(table["block_bytes"]),
                algorithm=table["algorithm"],
            )
        except (KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError("it is not a table of digests") from error
        if digests.block_bytes < 1 or len(digests.blocks) != -(-digests.size_bytes // digests.block_bytes):
            raise ValueError("its number of digests does not fit its size")
        return digests


class DigestingWriter:
    """Passes bytes on to ``stream`` and digests them on their way, block by block.

    Args:
        stream: takes the bytes.
        helper: digests a large part of a block while ``stream`` takes it; both leave the interpreter's lock.
        algorithm: computes the digests of blocks.
    """

    def __init__(self, stream: BinaryIO, helper: Executor, algorithm: Algorithm = FAST) -> None:
        self._stream = stream
        self._helper = helper
        self._algorithm: Algorithm = algorithm
        self._running = HASHES[algorithm]()
        self._filled = 0
        self._blocks: list[str] = []
        self._size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Write all of ``data``; a memoryview must be one of bytes."""
        view = memoryview(data)
        while view:
            chunk = view[: BLOCK_BYTES - self._filled]
            if len(chunk) < _WORTH_A_THREAD_BYTES:
                self._running.update(chunk)
                self._stream.write(chunk)
            else:
                digested = self._helper.submit(self._running.update, chunk)
                try:
                    self._stream.write(chunk)
                finally:
                    digested.result()
            self._filled += len(chunk)
            self._size += len(chunk)
            if self._filled == BLOCK_BYTES:
                self._close_block()
            view = view[len(chunk) :]

    def finish(self) -> BlockDigests:
        """Return the digests of everything that was written; call it once."""
        if self._filled:
            self._close_block()
        return BlockDigests(size_bytes=self._size, blocks=tuple(self._blocks), algorithm=self._algorithm)

    def _close_block(self) -> None:
        self._blocks.append(self._running.hexdigest())
        PROGRESS.advance()
        self._running = HASHES[self._algorithm]()
        self._filled = 0


@dataclass(frozen=True, slots=True)
class AttemptWriter:
    """Writes the data files of one attempt and remembers their entries for the manifest."""

    storage: CheckpointStore
    prefix: str
    """Beginning of the keys of the attempt's files."""
    digests: Algorithm = FAST
    """Algorithm of the digests: that of the manifest."""
    entries: dict[str, FileEntry] = field(default_factory=dict)

    @contextmanager
    def file(self, name: str) -> Iterator[DigestingWriter]:
        """Stream the file ``name``; its digests are written when the block ends without an exception."""
        with ThreadPoolExecutor(1) as helper, self.storage.open_write(self.prefix + name) as stream:
            writer = DigestingWriter(stream, helper, self.digests)
            yield writer
        digests = writer.finish()
        encoded = digests.encode()
        with self.storage.open_write(self.prefix + digests_name(name)) as stream:
            stream.write(encoded)
        self.entries[name] = FileEntry(
            size_bytes=digests.size_bytes,
            digests_bytes=len(encoded),
            digests_digest=digest(encoded, self.digests),
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """A range of a file and the memory that it fills."""

    start: int
    into: memoryview
    """Writable, of bytes; its length is the range's."""

    @property
    def end(self) -> int:
        """First byte after the range."""
        return self.start + len(self.into)


class VerifiedFile:
    """One data file of a committed checkpoint; no byte leaves it unverified.

    Raises:
        CheckpointDamaged: from every method, when the file or its digests are missing, have another size than the
            manifest says or differ from their digests; the error names the file.
    """

    def __init__(self, storage: CheckpointStore, manifest: Manifest, name: str) -> None:
        self._file = storage, manifest, name
        self._storage = storage
        self._key = manifest.prefix + name
        self._where = f"{storage.uri}/{self._key}"
        if name not in manifest.files:
            raise CheckpointDamaged(where=self._where, reason="the manifest does not list it")
        self._entry = entry = manifest.files[name]
        try:
            if not 0 <= entry.digests_bytes <= _MOST_DIGESTS_BYTES:
                raise ValueError(f"the manifest gives it {entry.digests_bytes} bytes")
            with storage.open_read(digests_name(self._key)) as stream:
                data = stream.read(entry.digests_bytes + 1)
            if len(data) != entry.digests_bytes or digest(data, manifest.digests) != entry.digests_digest:
                raise ValueError("it differs from its digest in the manifest")
            self.digests_file = data
            """The bytes of the file of its digests."""
            self._digests = BlockDigests.decode(data)
            if self._digests.size_bytes != entry.size_bytes:
                raise ValueError("it and the manifest give different sizes")
            if self._digests.algorithm != manifest.digests:
                raise ValueError(f"its digests are {self._digests.algorithm}, those of the manifest {manifest.digests}")
        except (FileNotFoundError, ValueError) as error:
            reason = "it is missing" if isinstance(error, FileNotFoundError) else str(error)
            raise CheckpointDamaged(where=digests_name(self._where), reason=reason) from error

    @property
    def size_bytes(self) -> int:
        """Return the size of the file in bytes, as the manifest has it."""
        return self._entry.size_bytes

    def verify(self) -> None:
        """Read the whole file and compare every block with its digest."""
        for _ in self.blocks():
            pass

    def blocks(self) -> Iterator[memoryview]:
        """Yield the whole file in order, block after block; each is verified, and overwritten by the next."""
        check_size(*self._file)
        for _, block in self._visit(0, len(self._digests.blocks)):
            yield block

    def read(self, ranges: Sequence[Wanted]) -> None:
        """Fill all ``ranges``. A block that any of them touches is read once, also where many touch it."""
        check_size(*self._file)
        wanted = sorted((span for span in ranges if len(span.into)), key=lambda span: span.start)
        if any(span.start < 0 or span.end > self._entry.size_bytes for span in wanted):
            raise self.damaged("the manifest names bytes beyond its end")
        if any(left.end > right.start for left, right in pairwise(wanted)):
            raise self.damaged("the manifest names the same bytes twice")
        runs: list[list[int]] = []  # maximal runs [first, last) of neighbouring blocks that the ranges touch
        for span in wanted:
            begin, end = span.start // self._digests.block_bytes, -(-span.end // self._digests.block_bytes)
            if runs and begin <= runs[-1][1]:
                runs[-1][1] = max(runs[-1][1], end)
            else:
                runs.append([begin, end])
        for first, last in runs:
            for offset, block in self._visit(first, last):
                for span in wanted[bisect_left(wanted, offset, key=lambda range_: range_.end) :]:
                    if span.start >= offset + len(block):
                        break
                    begin, end = max(span.start, offset), min(span.end, offset + len(block))
                    span.into[begin - span.start : end - span.start] = block[begin - offset : end - offset]

    def _visit(self, first: int, last: int) -> Iterator[tuple[int, memoryview]]:
        """Read the blocks ``[first, last)`` in one stream; each with its offset, once it equals its digest."""
        block_bytes, size = self._digests.block_bytes, self._entry.size_bytes
        start, end = first * block_bytes, min(last * block_bytes, size)
        buffer = memoryview(bytearray(min(block_bytes, end - start)))
        try:
            with self._storage.open_read(self._key, start, end - start) as stream:
                for number in range(first, last):
                    offset = number * block_bytes
                    block = buffer[: min(block_bytes, size - offset)]
                    done = 0
                    while done < len(block):  # reads may be short
                        data = stream.read(len(block) - done)
                        if not data:
                            raise self.damaged("it is shorter than its digests say")
                        block[done : done + len(data)] = data
                        done += len(data)
                    if HASHES[self._digests.algorithm](block).hexdigest() != self._digests.blocks[number]:
                        raise self.damaged(f"bytes {offset} to {offset + len(block)} differ from their digest")
                    PROGRESS.advance()
                    yield offset, block
        except FileNotFoundError as error:
            raise self.damaged("it is missing") from error

    def damaged(self, reason: str) -> CheckpointDamaged:
        """Return the error that names this file."""
        return CheckpointDamaged(where=self._where, reason=reason)


def check_size(storage: CheckpointStore, manifest: Manifest, name: str) -> None:
    """Compare the size of the data file ``name`` with the manifest's, without reading it.

    Raises:
        CheckpointDamaged: it is missing, or has another.
    """
    where, entry = f"{storage.uri}/{manifest.prefix}{name}", manifest.files[name]
    info = storage.stat(manifest.prefix + name)
    if info is None:
        raise CheckpointDamaged(where=where, reason="it is missing")
    if info.size_bytes != entry.size_bytes:
        raise CheckpointDamaged(where=where, reason=f"it has {info.size_bytes} bytes instead of {entry.size_bytes}")


def read_whole(storage: CheckpointStore, manifest: Manifest, name: str) -> bytes:
    """Return all bytes of the data file ``name``, verified; for small files."""
    file = VerifiedFile(storage, manifest, name)
    check_size(storage, manifest, name)  # before memory is taken
    data = bytearray(manifest.files[name].size_bytes)
    file.read([Wanted(0, memoryview(data))])
    return bytes(data)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor, or a region of one, in a file."""

    name: str
    """Name of the tensor in the manifest; with ``@`` and a number where a file holds several regions of it."""
    dtype: str
    shape: tuple[int, ...]
    """Shape of the region."""
    start: int
    """Byte of the file at which its elements begin."""


def tensors_by_file(manifest: Manifest, files: Collection[str]) -> dict[str, list[StoredTensor]]:
    """Return the tensors in each of ``files``, according to the manifest."""
    tensors: dict[str, list[StoredTensor]] = defaultdict(list)
    for index in manifest.tensors.values():
        for name, entry in index.items():
            for part in entry.parts:
                if part.file in files:
                    tensors[part.file].append(StoredTensor(name, entry.dtype, part.shape, part.start))
    return tensors


def check_header(file: VerifiedFile, expected: Collection[StoredTensor]) -> None:
    """Compare the header of a shard with its tensors according to the manifest.

    Raises:
        CheckpointDamaged: they differ, or the file has no header.
    """
    try:
        head = bytearray(min(BLOCK_BYTES, file.size_bytes))  # one block, which is read whole in any case
        file.read([Wanted(0, memoryview(head))])
        size = int.from_bytes(head[:_LENGTH_BYTES], "little")
        end = _LENGTH_BYTES + size
        if len(head) < _LENGTH_BYTES or end > file.size_bytes or size > _MOST_HEADER_BYTES:
            raise ValueError(f"a length of {size} bytes")
        rest = bytearray(max(0, end - len(head)))
        file.read([Wanted(len(head), memoryview(rest))])
        header = json.loads((head + rest)[_LENGTH_BYTES:end])
        stored: dict[int, list[StoredTensor]] = defaultdict(list)  # empty tensors begin where the next one does
        last = end
        for name, row in header.items():
            if name == "__metadata__":
                continue
            shape, (begin, behind) = tuple(row["shape"]), row["data_offsets"]
            entry = StoredTensor(name, DTYPES[row["dtype"]], shape, end + begin)
            if any(type(length) is not int or length < 0 for length in shape):
                raise ValueError(f"{name!r} has the shape {shape}")
            size_bytes = math.prod(shape) * ITEM_BYTES[entry.dtype]
            if behind - begin != size_bytes:
                raise ValueError(f"{name!r} takes {behind - begin} bytes instead of {size_bytes}")
            last = max(last, end + behind)
            stored[entry.start].append(entry)
        if last != file.size_bytes:
            raise ValueError(f"its tensors end at byte {last} of {file.size_bytes}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise file.damaged(f"it has no header of the safetensors format ({error})") from error
    for tensor in expected:
        there, same = stored[tensor.start], None
        for entry in there:
            plain, _, number = entry.name.rpartition("@")
            name = plain if number.isdecimal() and plain == tensor.name else entry.name
            if (name, entry.dtype, entry.shape) == (tensor.name, tensor.dtype, tensor.shape):
                same = entry
                break
        if same is None:
            description = _described(there[0]) if there else "no tensor"
            raise file.damaged(
                f"its header says {description} at byte {tensor.start}, where the manifest says {_described(tensor)}"
            )
        there.remove(same)
    unlisted = next((entry for there in stored.values() for entry in there), None)
    if unlisted is not None:
        raise file.damaged(f"its header says {_described(unlisted)}, which the manifest does not list")


def _described(tensor: StoredTensor) -> str:
    return f"{tensor.name!r} {tensor.dtype} {list(tensor.shape)}"
