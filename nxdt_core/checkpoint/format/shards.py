"""Tensors into shards: files in the safetensors format, which the safetensors library reads as well.

Tensors are streamed: in addition to those that the caller holds, at most one is in memory (none, if it is
contiguous and on the host).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from nxdt_core.checkpoint.format.digested_files import AttemptWriter
from nxdt_core.checkpoint.format.file_names import shard_name
from nxdt_core.checkpoint.format.safetensors_stream import SafetensorsLayout, TensorSpec, grouped
from nxdt_core.checkpoint.format.tensor_index import TensorPart
from nxdt_core.checkpoint.pieces import dtype_name
from nxdt_core.protocols.piece import Piece, ShardInfo

__all__ = ["write_listed", "write_pieces"]

SHARD_BYTES = 4 * 2**30
"""A shard is closed when the next tensor would make it larger. Several files can be transferred in parallel."""


def write_pieces(
    writer: AttemptWriter,
    section: str,
    pieces: Mapping[str, Piece],
    *,
    rank: int,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, TensorPart]:
    """Write the pieces of ``section`` that ``rank`` writes, as shards of that rank.

    Returns:
        The location of each piece, for the manifest.
    """
    held = {
        name: ShardInfo(dtype=dtype_name(piece.tensor), shape=piece.shape, box=piece.box)
        for name, piece in pieces.items()
    }
    return write_listed(
        writer,
        section,
        held,
        lambda names: (pieces[name].tensor for name in names),
        rank=rank,
        shard_bytes=shard_bytes,
    )


def write_listed(
    writer: AttemptWriter,
    section: str,
    held: Mapping[str, ShardInfo],
    read: Callable[[Sequence[str]], Iterable[torch.Tensor]],
    *,
    rank: int,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, TensorPart]:
    """Write tensors as :func:`write_pieces` does; ``read`` gives each by its name, in that order, when it is due."""
    specs = {name: TensorSpec(each.dtype, each.box.shape) for name, each in held.items()}
    parts: dict[str, TensorPart] = {}
    for number, group in enumerate(grouped(specs, shard_bytes)):
        file, layout = shard_name(section, rank, number), SafetensorsLayout(group)
        with writer.file(file) as stream:
            layout.write(stream, read(layout.names))
        for name, start in layout.starts.items():
            box = held[name].box
            parts[name] = TensorPart(file=file, start=start, offsets=box.offsets, shape=box.shape)
    return parts
