"""Tensors into shards: files in the safetensors format, which the safetensors library reads as well.

A shard is 8 bytes of length, a JSON header, then the elements of each tensor, row-major and little-endian. Tensors
are streamed: beside the tensors themselves no more than one of them is in memory (none, if it is contiguous and
on the host).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch

from nxdt_core.checkpoint.files import AttemptWriter
from nxdt_core.checkpoint.layout import shard_name
from nxdt_core.checkpoint.pieces import dtype_name
from nxdt_core.checkpoint.tensor_index import TensorPart
from nxdt_core.devices import HOST
from nxdt_core.protocols.piece import Piece

__all__ = ["bytes_of", "write_pieces"]

SHARD_BYTES = 4 * 2**30
"""A shard is closed when the next tensor would make it larger; many files can be moved at once, one cannot."""

_SAFETENSORS_NAME: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
}


def write_pieces(
    writer: AttemptWriter,
    section: str,
    pieces: Mapping[str, Piece],
    *,
    rank: int,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, TensorPart]:
    """Write what ``rank`` has to write of ``section`` as shards of its own.

    Returns:
        Where each piece lies, for the manifest.
    """
    parts: dict[str, TensorPart] = {}
    for number, names in enumerate(_shards(pieces, shard_bytes)):
        file = shard_name(section, rank, number)
        starts = _write_shard(writer, file, {name: pieces[name].tensor for name in names})
        for name, start in starts.items():
            box = pieces[name].box
            parts[name] = TensorPart(file=file, start=start, offsets=box.offsets, shape=box.shape)
    return parts


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _shards(pieces: Mapping[str, Piece], shard_bytes: int) -> Iterator[list[str]]:
    """Names by shard, in order, each shard filled up to ``shard_bytes``; a larger tensor has one to itself."""
    names: list[str] = []
    filled = 0
    for name, piece in pieces.items():
        size = piece.tensor.numel() * piece.tensor.element_size()
        if names and filled + size > shard_bytes:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    if names:
        yield names


def _write_shard(writer: AttemptWriter, file: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Write one file; returns the byte at which each tensor begins."""
    # Widest elements first: then every tensor is aligned to its element, as readers that map the file need it.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name, tensor in ordered.items():
        starts[name], end = end, end + tensor.numel() * tensor.element_size()
        dtype = _SAFETENSORS_NAME[dtype_name(tensor)]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [starts[name], end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    data_start = 8 + len(encoded)
    with writer.file(file) as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in ordered.values():
            stream.write(bytes_of(tensor.detach().resolve_neg().to(HOST).contiguous()))
    return {name: data_start + start for name, start in starts.items()}
