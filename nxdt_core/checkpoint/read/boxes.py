"""Reading boxes of tensors out of a checkpoint, independent of the boxes in which it was written.

Data is read directly into a tensor that is on the host, in the checkpoint's dtype, and row after row as in the file.
For any other tensor it passes through buffers, of which few exist at a time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from nxdt_core.checkpoint.format.digested_files import VerifiedFile, Wanted, check_header, check_size, tensors_by_file
from nxdt_core.checkpoint.format.manifest import Manifest
from nxdt_core.checkpoint.format.shards import bytes_of
from nxdt_core.checkpoint.format.tensor_index import ITEM_BYTES, TensorEntry, TensorPart
from nxdt_core.distributed.buckets import buckets
from nxdt_core.distributed.devices import profile_of
from nxdt_core.errors.checkpoints import CheckpointDamaged
from nxdt_core.protocols.piece import Box, Piece
from nxdt_core.protocols.store import CheckpointStore

_BUFFER_BYTES = 256 * 2**20
"""Buffers at a time (more where a single tensor needs it); each batch reads the blocks that it touches once."""


@dataclass(frozen=True, slots=True)
class _Read:
    """Rows of a part, and the destination of those elements of them that are wanted."""

    file: str
    start: int
    buffer: torch.Tensor
    """Whole rows; the target's own memory where :attr:`copy_to` is None."""
    copy_to: torch.Tensor | None = None
    rows_box: tuple[slice, ...] = ()

    def buffer_bytes(self) -> int:
        """Return the bytes of the buffer; 0 where that is the target's own memory."""
        return 0 if self.copy_to is None else self.buffer.nbytes

    def finish(self) -> None:
        """Copy what was read to its destination."""
        if self.copy_to is not None:
            self.copy_to.copy_(self.buffer[self.rows_box])


@torch.no_grad()
def fill(
    storage: CheckpointStore, manifest: Manifest, wanted: Mapping[str, Piece], entries: Mapping[str, TensorEntry]
) -> None:
    """Fill the pieces ``wanted`` in place; only blocks that hold elements of them are read.

    Args:
        storage: the store that holds the checkpoint.
        manifest: the manifest of the checkpoint.
        wanted: pieces by name; their dtype and device may differ from the checkpoint's, their whole shape may not.
        entries: the location of each tensor by name; no two tensors share bytes.

    Raises:
        CheckpointDamaged: a file is not what was written.
    """
    files: dict[str, VerifiedFile] = {}
    needed = {part.file for entry in entries.values() for part in entry.parts}
    stored = tensors_by_file(manifest, needed)
    for batch in buckets(_reads(wanted, entries), _Read.buffer_bytes, _BUFFER_BYTES):
        ranges: dict[str, list[Wanted]] = defaultdict(list)
        for read in batch:
            ranges[read.file].append(Wanted(read.start, bytes_of(read.buffer)))
        for name, chosen in ranges.items():
            if name not in files:
                files[name] = VerifiedFile(storage, manifest, name)
                check_header(files[name], stored[name])
            files[name].read(chosen)
        for read in batch:
            read.finish()


def check_fits(storage: CheckpointStore, manifest: Manifest, entries: Iterable[TensorEntry]) -> None:
    """Check, before memory is taken, that forged shapes do not ask for more than the files hold.

    Raises:
        CheckpointDamaged: they do; or a file has another size than the manifest says, which may be forged, too.
    """
    ends: dict[str, int] = {}
    for entry in entries:
        for part in entry.parts:
            ends[part.file] = max(ends.get(part.file, 0), part.start + entry.part_bytes(part))
    for name, end in ends.items():
        if name not in manifest.files or end > manifest.files[name].size_bytes:
            where = f"{storage.uri}/{manifest.prefix}{name}"
            raise CheckpointDamaged(where=where, reason="the manifest names bytes beyond its end")
        check_size(storage, manifest, name)


def _reads(wanted: Mapping[str, Piece], entries: Mapping[str, TensorEntry]) -> Iterator[_Read]:
    for name, piece in wanted.items():
        for part in entries[name].parts:
            common = piece.box.intersection(Box(part.offsets, part.shape))
            if common is not None:
                yield _read(piece, part, common, entries[name].dtype)


def _read(piece: Piece, part: TensorPart, common: Box, dtype_name: str) -> _Read:
    """Return how to read ``common`` out of ``part`` into ``piece``: the rows (first dimension) that it spans."""
    dtype = getattr(torch, dtype_name)
    inner = Box(part.offsets, part.shape)
    first = common.offsets[0] - part.offsets[0] if common.shape else 0
    rows = common.shape[0] if common.shape else 1
    row_elements = math.prod(part.shape[1:])
    start = part.start + first * row_elements * ITEM_BYTES[dtype_name]
    target = piece.tensor[common.within(piece.box)]
    whole_rows = common.shape[1:] == part.shape[1:]
    if whole_rows and target.dtype == dtype and profile_of(target.device).host and target.is_contiguous():
        return _Read(part.file, start, target)
    buffer = torch.empty((rows, *part.shape[1:]) if part.shape else (), dtype=dtype)
    rows_box = (slice(None), *common.within(inner)[1:]) if part.shape else ()
    return _Read(part.file, start, buffer, target, rows_box)
