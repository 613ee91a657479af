"""The location of each tensor: the part of a manifest that finds a tensor's bytes without opening a shard. Torch-free.

A tensor consists of parts, regions that tile it; one part for a whole tensor, one per rank (or several) for a sharded
one. A part's elements are contiguous and row-major in one file.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

_DTYPES = {
    "bool": (1, "BOOL"),
    "uint8": (1, "U8"),
    "int8": (1, "I8"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "int16": (2, "I16"),
    "uint16": (2, "U16"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "int32": (4, "I32"),
    "uint32": (4, "U32"),
    "float32": (4, "F32"),
    "int64": (8, "I64"),
    "uint64": (8, "U64"),
    "float64": (8, "F64"),
}
ITEM_BYTES: Mapping[str, int] = {name: size for name, (size, _) in _DTYPES.items()}
"""Bytes of an element by the name of the torch dtype, for every dtype that a checkpoint can hold."""
SAFETENSORS_NAMES: Mapping[str, str] = {name: code for name, (_, code) in _DTYPES.items()}
"""Name of the safetensors format by the name of the torch dtype."""
DTYPES: Mapping[str, str] = {code: name for name, code in SAFETENSORS_NAMES.items()}
"""Name of the torch dtype by the format's name, for every dtype that a checkpoint can hold."""

_MOST_CUT = 8
"""Dimensions of one tensor that its regions divide. An index with more is forged, and each one doubles the corners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """A region of a tensor, and the location of its bytes."""

    file: str
    """Relative to the attempt's directory."""
    start: int
    """Byte of the file at which its elements begin."""
    offsets: tuple[int, ...]
    """Index in the whole tensor of its first element."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor; ``same_as`` names the tensor whose memory it shared when it was saved, and then has no parts."""

    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    parts: tuple[TensorPart, ...] = ()
    same_as: str | None = None

    def part_bytes(self, part: TensorPart) -> int:
        """Return the bytes that ``part`` takes in its file."""
        return math.prod(part.shape) * ITEM_BYTES[self.dtype]


def encode_index(index: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """JSON-able: a part is ``[file, start]``, followed by its offsets and shape unless it is the whole tensor."""
    table: dict[str, Any] = {}
    for name, entry in index.items():
        table[name] = {"dtype": entry.dtype, "shape": entry.shape}
        if entry.same_as is not None:
            table[name]["same_as"] = entry.same_as
            continue
        table[name]["parts"] = [
            [part.file, part.start, *(() if part.shape == entry.shape else (part.offsets, part.shape))]
            for part in entry.parts
        ]
    return table


def decode_index(table: Mapping[str, Any]) -> dict[str, TensorEntry]:
    """Return the index from bytes of :func:`encode_index`.

    Raises:
        ValueError: an entry contradicts itself. (``KeyError``, ``TypeError``, ``AttributeError``: it is malformed.)
    """
    index: dict[str, TensorEntry] = {}
    for name, row in table.items():
        dtype, shape = str(row["dtype"]), _sizes(row["shape"])
        if dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}")
        if "same_as" in row:
            index[name] = TensorEntry(dtype=dtype, shape=shape, same_as=str(row["same_as"]))
            continue
        parts = tuple(
            TensorPart(
                file=str(file),
                start=_sizes([start])[0],
                offsets=_sizes(region[0]) if region else (0,) * len(shape),
                shape=_sizes(region[1]) if region else shape,
            )
            for file, start, *region in row["parts"]
        )
        if not parts or sum(math.prod(part.shape) for part in parts) != math.prod(shape):
            raise ValueError(f"the parts of tensor {name!r} do not make it up")
        for part in parts:
            ends = (offset + size for offset, size in zip(part.offsets, part.shape, strict=True))
            if any(end > size for end, size in zip(ends, shape, strict=True)):
                raise ValueError(f"a part of tensor {name!r} is outside of it")
        if not _tile(parts, shape):
            raise ValueError(f"the parts of tensor {name!r} overlap")
        index[name] = TensorEntry(dtype=dtype, shape=shape, parts=parts)
    for name, entry in index.items():
        if entry.same_as is not None and not index[entry.same_as].parts:
            raise ValueError(f"tensor {name!r} shares the memory of one that is not stored")
    return index


def check_places(sections: Mapping[str, Mapping[str, TensorEntry]], sizes: Mapping[str, int]) -> None:
    """Check that no two tensors have the same bytes, and that each tensor is in a file of its section.

    Args:
        sections: the index of each section.
        sizes: bytes of each file of the checkpoint.

    Raises:
        ValueError: two tensors share bytes, or a tensor is in another file.
    """
    ranges: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for section, index in sections.items():
        for name, entry in index.items():
            for part in entry.parts:
                if part.file not in sizes or part.file.partition("/")[0] != section:
                    raise ValueError(f"tensor {name!r} of {section!r} is in {part.file!r}, which holds none of these")
                size = entry.part_bytes(part)
                if size:
                    ranges[part.file].append((part.start, part.start + size, name))
    for file, taken in ranges.items():
        for (_, end, name), (start, _, other) in pairwise(sorted(taken)):
            if start < end:
                raise ValueError(f"tensors {name!r} and {other!r} have the same bytes of {file!r}")


def _tile(parts: tuple[TensorPart, ...], shape: tuple[int, ...]) -> bool:
    """Return whether regions inside a region, with as many elements in total as that region, cover each element once.

    If they do, an even number of regions shares every corner except those of the whole. Conversely, if every such
    corner is shared by an even number, each element is covered an odd number of times, and therefore once. The check
    takes time proportional to the number of regions.
    """
    regions = [part for part in parts if math.prod(part.shape)]
    if len(regions) < 2:
        return True
    cut = [dim for dim, size in enumerate(shape) if any(part.shape[dim] != size for part in regions)]
    if len(cut) > _MOST_CUT:
        raise ValueError(f"its parts are cut along {len(cut)} dimensions")
    odd: set[tuple[int, ...]] = set(product(*((0, shape[dim]) for dim in cut)))
    for part in regions:
        ends = ((part.offsets[dim], part.offsets[dim] + part.shape[dim]) for dim in cut)
        odd.symmetric_difference_update(product(*ends))
    return not odd


def _sizes(values: list[Any]) -> tuple[int, ...]:
    sound = all(type(value) is int and value >= 0 for value in values)
    if not sound or math.prod(max(value, 1) for value in values) >= 2**62:  # torch's sizes are signed 64-bit
        raise ValueError(f"{values!r} are not sizes")
    return tuple(values)
