"""Tensors into shards: files in the safetensors format, which the safetensors library reads as well.

A file consists of 8 bytes with the length of the header, a JSON header, and the elements of each tensor, row-major and
little-endian. It is written as a stream: the location of each tensor is known before any tensor is available. In
addition to the tensors that the caller holds, at most one is in memory (none, if it is contiguous and on the host).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nxdt_core.checkpoint.format.digested_files import AttemptWriter
from nxdt_core.checkpoint.format.file_names import shard_name
from nxdt_core.checkpoint.format.tensor_index import ITEM_BYTES, SAFETENSORS_NAMES, TensorPart
from nxdt_core.checkpoint.pieces import dtype_name
from nxdt_core.distributed.buckets import buckets
from nxdt_core.distributed.devices import HOST
from nxdt_core.protocols.piece import Piece, ShardInfo

__all__ = ["SafetensorsLayout", "TensorSpec", "Writable", "bytes_of", "grouped", "write_listed", "write_pieces"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its elements."""

    dtype: str
    """Name of the dtype, such as ``float32``."""
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Return the size of the tensor's elements in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Writable(Protocol):
    """A stream that bytes can be written to."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Write all of ``data``."""
        ...


class SafetensorsLayout:
    """One file, laid out for tensors of known dtypes and shapes."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        # Widest elements first: then every tensor is aligned to its element, as readers that map the file need it.
        self._specs = dict(sorted(specs.items(), key=lambda item: -ITEM_BYTES[item[1].dtype]))
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        ends, end = [0], 0
        for name, spec in self._specs.items():
            end += spec.size_bytes
            dtype = SAFETENSORS_NAMES[spec.dtype]
            table[name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [ends[-1], end]}
            ends.append(end)
        encoded = json.dumps(table, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._header = len(encoded).to_bytes(8, "little") + encoded
        self.starts = {name: len(self._header) + start for name, start in zip(self._specs, ends, strict=False)}
        """Byte of the file at which the elements of each tensor begin, by name."""
        self.size_bytes = len(self._header) + end
        """Size of the whole file."""

    @property
    def names(self) -> list[str]:
        """Return the names of the tensors, in the order of the file."""
        return list(self._specs)

    def write(self, stream: Writable, tensors: Iterable[torch.Tensor]) -> None:
        """Write the file; ``tensors`` come in the order of :attr:`names`, and each is forgotten once it is written.

        Raises:
            ValueError: a tensor is not what was laid out.
        """
        stream.write(self._header)
        due = iter(tensors)
        for name, spec in self._specs.items():
            tensor = next(due)  # not by zip, whose last tuple would hold one more
            if (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) != (spec.dtype, spec.shape):
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)} instead of {spec}")
            stream.write(bytes_of(tensor.detach().resolve_neg().to(HOST).contiguous()))
            del tensor


def grouped(specs: Mapping[str, TensorSpec], max_bytes: int) -> Iterator[dict[str, TensorSpec]]:
    """Return what goes into each file, in order, filled up to ``max_bytes``; a larger tensor has one to itself."""
    return map(dict, buckets(specs.items(), lambda named: named[1].size_bytes, max_bytes))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


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
    shards = {
        name: ShardInfo(dtype=dtype_name(piece.tensor), shape=piece.shape, box=piece.box)
        for name, piece in pieces.items()
    }
    return write_listed(
        writer,
        section,
        shards,
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
    specs = {name: TensorSpec(shard.dtype, shard.box.shape) for name, shard in held.items()}
    parts: dict[str, TensorPart] = {}
    for number, group in enumerate(grouped(specs, shard_bytes)):
        file, layout = shard_name(section, rank, number), SafetensorsLayout(group)
        with writer.file(file) as stream:
            layout.write(stream, read(layout.names))
        for name, start in layout.starts.items():
            box = held[name].box
            parts[name] = TensorPart(file=file, start=start, offsets=box.offsets, shape=box.shape)
    return parts
