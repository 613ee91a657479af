"""Whether a manifest and the shards that it points to agree: each tensor's name, dtype, shape and place in its file.

A manifest finds a tensor's bytes without opening a shard, and the shard's own header says the same for every reader of
safetensors. Where the two differ one of them was changed, and the bytes would be taken for another tensor.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nxdt_core.checkpoint.format.digested_files import VerifiedFile, Wanted
from nxdt_core.checkpoint.format.digests import BLOCK_BYTES
from nxdt_core.checkpoint.format.manifest import Manifest
from nxdt_core.checkpoint.format.tensor_index import DTYPES, ITEM_BYTES

__all__ = ["StoredTensor", "check_header", "tensors_by_file"]

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100 * 2**20
"""What the safetensors library accepts; a longer one is forged, and must not have the memory that it asks for."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor, or a box of one, in a file."""

    name: str
    """In the manifest; a file may add ``@`` and a number to it, where it holds several boxes of one tensor."""
    dtype: str
    shape: tuple[int, ...]
    """Of the box."""
    start: int
    """Byte of the file at which its elements begin."""


def tensors_by_file(manifest: Manifest, files: Collection[str]) -> dict[str, list[StoredTensor]]:
    """Return the tensors in each of ``files``, according to the manifest."""
    found: dict[str, list[StoredTensor]] = defaultdict(list)
    for index in manifest.tensors.values():
        for name, entry in index.items():
            for part in entry.parts:
                if part.file in files:
                    found[part.file].append(StoredTensor(name, entry.dtype, part.shape, part.start))
    return found


def check_header(file: VerifiedFile, expected: Collection[StoredTensor]) -> None:
    """Compare the header of a shard with its tensors according to the manifest.

    Raises:
        CheckpointDamaged: they differ, or the file has no header.
    """
    try:
        header, end = _read_header(file)
        stored: dict[int, list[StoredTensor]] = defaultdict(list)  # empty tensors begin where the next one does
        for each in _entries(header, end, file.size_bytes):
            stored[each.start].append(each)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise file.damaged(f"it has no header of the safetensors format ({error})") from error
    for tensor in expected:
        there = stored[tensor.start]
        same = next((each for each in there if _same(each, tensor)), None)
        if same is None:
            found = _described(there[0]) if there else "no tensor"
            raise file.damaged(
                f"its header says {found} at byte {tensor.start}, where the manifest says {_described(tensor)}"
            )
        there.remove(same)
    unlisted = next((each for there in stored.values() for each in there), None)
    if unlisted is not None:
        raise file.damaged(f"its header says {_described(unlisted)}, which the manifest does not list")


def _same(found: StoredTensor, expected: StoredTensor) -> bool:
    plain, _, number = found.name.rpartition("@")
    name = plain if number.isdecimal() and plain == expected.name else found.name
    return (name, found.dtype, found.shape) == (expected.name, expected.dtype, expected.shape)


def _read_header(file: VerifiedFile) -> tuple[Mapping[str, Any], int]:
    """The header and the byte at which the elements begin."""
    head = bytearray(min(BLOCK_BYTES, file.size_bytes))  # one block, which is read whole in any case
    file.read([Wanted(0, memoryview(head))])
    size = int.from_bytes(head[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + size
    if len(head) < _LENGTH_BYTES or end > file.size_bytes or size > _MOST_HEADER_BYTES:
        raise ValueError(f"a length of {size} bytes")
    rest = bytearray(max(0, end - len(head)))
    file.read([Wanted(len(head), memoryview(rest))])
    return json.loads((head + rest)[_LENGTH_BYTES:end]), end


def _entries(header: Mapping[str, Any], begin: int, size_bytes: int) -> Iterator[StoredTensor]:
    last = begin
    for name, row in header.items():
        if name == "__metadata__":
            continue
        shape, (start, end) = tuple(row["shape"]), row["data_offsets"]
        stored = StoredTensor(name, DTYPES[row["dtype"]], shape, begin + start)
        if end - start != _size_bytes(stored):
            raise ValueError(f"{name!r} takes {end - start} bytes instead of {_size_bytes(stored)}")
        last = max(last, begin + end)
        yield stored
    if last != size_bytes:
        raise ValueError(f"its tensors end at byte {last} of {size_bytes}")


def _size_bytes(stored: StoredTensor) -> int:
    size = ITEM_BYTES[stored.dtype]
    for length in stored.shape:
        if type(length) is not int or length < 0:
            raise ValueError(f"{stored.name!r} has the shape {stored.shape}")
        size *= length
    return size


def _described(tensor: StoredTensor) -> str:
    return f"{tensor.name!r} {tensor.dtype} {list(tensor.shape)}"
