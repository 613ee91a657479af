"""Tensors to and from shards: files in the safetensors format, which the safetensors library reads as well.

A shard is 8 bytes of length, a JSON header, then the elements of each tensor, row-major and little-endian. Tensors
are streamed: beside the tensors themselves no more than one of them is in memory (none, if it is contiguous and
on the CPU).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch

from nxdt_core.checkpoint.files import AttemptWriter, VerifiedFile, Wanted
from nxdt_core.checkpoint.layout import shard_name
from nxdt_core.checkpoint.manifest import Manifest
from nxdt_core.checkpoint.tensor_index import ITEM_BYTES, TensorEntry, TensorPart
from nxdt_core.devices import HOST
from nxdt_core.errors import CheckpointDamaged, TensorNotInCheckpoint, TensorStateUnsupported
from nxdt_core.protocols.checkpoint_storage import CheckpointStorage

__all__ = ["check_tensor", "read_tensors", "write_tensors"]

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


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Refuse what has no plain bytes of its own.

    Raises:
        TensorStateUnsupported: sparse, quantised, complex, on the meta device, or a subclass such as DTensor.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise TensorStateUnsupported(where=name, reason=f"it is a {type(tensor).__qualname__}")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise TensorStateUnsupported(where=name, reason=f"it is {tensor.layout} on the device {tensor.device.type}")
    if _dtype_name(tensor) not in ITEM_BYTES:
        raise TensorStateUnsupported(where=name, reason=f"its dtype is {tensor.dtype}")


def write_tensors(
    writer: AttemptWriter,
    section: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    rank: int = 0,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, TensorEntry]:
    """Write ``tensors`` as shards of ``section``; tensors that are the same memory are written once.

    Returns:
        Where each lies, for the manifest.
    """
    owners, shared = _split_tied(tensors)
    index: dict[str, TensorEntry] = {}
    for number, names in enumerate(_shards(owners, shard_bytes)):
        file = shard_name(section, rank, number)
        index |= _write_shard(writer, file, {name: owners[name] for name in names})
    for name, owner in shared.items():
        index[name] = TensorEntry(dtype=index[owner].dtype, shape=index[owner].shape, same_as=owner)
    return {name: index[name] for name in tensors}


def read_tensors(
    storage: CheckpointStorage, manifest: Manifest, section: str, names: Iterable[str] | None = None
) -> dict[str, torch.Tensor]:
    """The named tensors of ``section`` on the CPU, all of them where ``names`` is None.

    Only blocks that hold asked-for elements are read. Tensors that shared memory when saved are one object again.

    Raises:
        CheckpointDamaged: a file is not what was written.
        TensorNotInCheckpoint: a name is not in the section.
    """
    index = manifest.tensors.get(section, {})
    chosen = list(index) if names is None else list(names)
    missing = tuple(name for name in chosen if name not in index)
    if missing:
        reason = f"no tensor {', '.join(missing[:8])} in its section {section!r}"
        raise TensorNotInCheckpoint(where=f"{storage.uri}/{manifest.prefix}", reason=reason)
    owner_of = {name: index[name].same_as or name for name in chosen}
    owners = _read_owners(storage, manifest, {owner: index[owner] for owner in owner_of.values()})
    return {name: owners[owner] for name, owner in owner_of.items()}


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _split_tied(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors with memory of their own, and the other names: name → owner with the very same elements."""
    owners: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}
    seen: dict[object, str] = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg())
        if tensor.numel() and place in seen:
            shared[name] = seen[place]
            continue
        seen[place] = name
        owners[name] = tensor
    return owners, shared


def _shards(tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> Iterator[list[str]]:
    """Names by shard, in order, each shard filled up to ``shard_bytes``; a larger tensor has one to itself."""
    names: list[str] = []
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if names and filled + size > shard_bytes:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    if names:
        yield names


def _write_shard(writer: AttemptWriter, file: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorEntry]:
    # Widest elements first: then every tensor is aligned to its element, as readers that map the file need it.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name, tensor in ordered.items():
        starts[name], end = end, end + tensor.numel() * tensor.element_size()
        dtype = _SAFETENSORS_NAME[_dtype_name(tensor)]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [starts[name], end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    data_start = 8 + len(encoded)
    with writer.file(file) as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in ordered.values():
            stream.write(_bytes_of(tensor.detach().resolve_neg().to(HOST).contiguous()))
    return {name: _entry(tensor, file, data_start + starts[name]) for name, tensor in ordered.items()}


def _entry(tensor: torch.Tensor, file: str, start: int) -> TensorEntry:
    shape = tuple(tensor.shape)
    part = TensorPart(file=file, start=start, offsets=(0,) * len(shape), shape=shape)
    return TensorEntry(dtype=_dtype_name(tensor), shape=shape, parts=(part,))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _read_owners(
    storage: CheckpointStorage, manifest: Manifest, entries: Mapping[str, TensorEntry]
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    wanted: dict[str, list[Wanted]] = defaultdict(list)
    pieces: list[tuple[str, TensorPart, torch.Tensor]] = []
    for name, entry in entries.items():
        _check_fits(storage, manifest, entry)
        dtype = getattr(torch, entry.dtype)
        tensors[name] = torch.empty(entry.shape, dtype=dtype)
        for part in entry.parts:
            whole = part.shape == entry.shape
            target = tensors[name] if whole else torch.empty(part.shape, dtype=dtype)
            if target.numel():
                wanted[part.file].append(Wanted(part.start, _bytes_of(target)))
            if not whole:
                pieces.append((name, part, target))
    for file, ranges in wanted.items():
        VerifiedFile(storage, manifest, file).read(ranges)
    for name, part, piece in pieces:
        box = tuple(slice(offset, offset + size) for offset, size in zip(part.offsets, part.shape, strict=True))
        tensors[name][box] = piece
    return tensors


def _check_fits(storage: CheckpointStorage, manifest: Manifest, entry: TensorEntry) -> None:
    """Before memory is taken: a forged shape must not ask for more than the files hold."""
    for part in entry.parts:
        file = manifest.files.get(part.file)
        if file is None or part.start + math.prod(part.shape) * ITEM_BYTES[entry.dtype] > file.size_bytes:
            where = f"{storage.uri}/{manifest.prefix}{part.file}"
            raise CheckpointDamaged(where=where, reason="the manifest names bytes beyond its end")
