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
from typing import BinaryIO, TypeAlias

import torch

from nxdt_core.checkpoint.format.digested_files import AttemptWriter, DigestingWriter
from nxdt_core.checkpoint.format.file_names import SECTIONS, shard_name
from nxdt_core.checkpoint.format.tensor_index import ITEM_BYTES, SAFETENSORS_NAMES, TensorPart
from nxdt_core.distributed.buckets import buckets
from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.distributed.placement import is_dtensor, local_of, local_shard_of, placed_like
from nxdt_core.errors.checkpoints import TensorStateUnsupported
from nxdt_core.protocols.tensor_shards import LocalShard, ShardInfo, TensorKey

Writable: TypeAlias = BinaryIO | DigestingWriter
"""A stream that bytes can be written to."""
SHARD_BYTES = 4 * 2**30
"""A shard is closed when the next tensor would make it larger. Several files can be transferred in parallel."""


def storable_shard(name: str, tensor: torch.Tensor | LocalShard) -> LocalShard:
    """Return this rank's shard of ``tensor``, called ``name`` in messages, of which a checkpoint can hold the bytes.

    Raises:
        TensorStateUnsupported: it has no plain bytes (sparse, quantised, complex, on the meta device, a subclass of
            Tensor, freed memory), or no place in the whole (:func:`nxdt_core.distributed.placement.local_shard_of`).
    """
    if not (is_dtensor(tensor) or isinstance(tensor, LocalShard)):
        _check_plain(name, tensor)
    part = local_shard_of(tensor, name)
    _check_plain(name, part.tensor)
    return part


def list_shards(
    section: str, tensors: Mapping[str, torch.Tensor | LocalShard], ties: Mapping[str, str] | None = None
) -> tuple[dict[TensorKey, LocalShard], dict[TensorKey, ShardInfo]]:
    """Return the shards of ``tensors``, and their listing, in which tied tensors name their owner.

    Args:
        section: of the checkpoint.
        tensors: by name.
        ties: name of a tied tensor → name of its owner. None compares addresses, which finds tensors that are the same
            memory; a device may give none, and then nothing is tied.

    Raises:
        TensorStateUnsupported: as of :func:`storable_shard`, or a tensor does not fit the owner that ``ties`` names.
    """
    local_shards = {name: storable_shard(f"{section}/{name}", tensor) for name, tensor in tensors.items()}
    owners, seen = dict(ties or {}), dict[object, str]()
    for name, part in local_shards.items() if ties is None else ():
        local = part.tensor
        address = local.data_ptr() if local.numel() else 0
        if address == 0:  # also of every tensor of a lazy device, such as torch-xla's: equal zeros say nothing
            continue
        memory = (local.device, address, local.dtype, local.stride(), local.is_neg(), part.shape, part.region)
        if (first := seen.setdefault(memory, name)) != name:
            owners[name] = first
    listing: dict[TensorKey, ShardInfo] = {}
    for name, part in local_shards.items():
        of = owners.get(name)
        owner = of if of in local_shards else None  # another rank has the owner, so this one writes its own copy
        if owner is not None and (local_shards[owner].shape, local_shards[owner].region) != (part.shape, part.region):
            raise TensorStateUnsupported(where=f"{section}/{name}", reason=f"it is tied to {owner} of another shape")
        dtype = dtype_name(part.tensor)
        listing[section, name] = ShardInfo(dtype=dtype, shape=part.shape, region=part.region, same_as=owner)
    return {(section, name): part for name, part in local_shards.items()}, listing


def empty_like(
    tensor: torch.Tensor | LocalShard, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor | LocalShard:
    """Return a tensor of ``shape`` without values: laid out as ``tensor`` where that has the same shape, else whole."""
    if isinstance(tensor, LocalShard):
        if tensor.shape != shape:
            return torch.empty(shape, dtype=dtype, device=tensor.tensor.device)
        return LocalShard(torch.empty_like(tensor.tensor, dtype=dtype), shape, tensor.region)
    if not is_dtensor(tensor) or tuple(tensor.shape) != shape:
        return torch.empty(shape, dtype=dtype, device=tensor.device)
    local = torch.empty_like(local_of(tensor).detach(), dtype=dtype, memory_format=torch.contiguous_format)
    return placed_like(local, tensor)


def filled_up(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return ``tensor`` and, up to ``rows``, further rows that are the mean of its rows."""
    mean = tensor.mean(0, keepdim=True, dtype=torch.float32).to(tensor.dtype)
    return torch.cat([tensor, mean.expand(rows - tensor.shape[0], *tensor.shape[1:])])


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a dtype without ``torch.``, such as ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise TensorStateUnsupported(where=name, reason=f"it is a {type(tensor).__qualname__}")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise TensorStateUnsupported(where=name, reason=f"it is {tensor.layout} on the device {tensor.device.type}")
    if profile_of(tensor.device).host and tensor.numel() and tensor.data_ptr() == 0:
        raise TensorStateUnsupported(where=name, reason="its memory was freed, or was never allocated")
    if dtype_name(tensor) not in ITEM_BYTES:
        raise TensorStateUnsupported(where=name, reason=f"its dtype is {tensor.dtype}")


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


def write_listed(
    writer: AttemptWriter,
    infos: Mapping[TensorKey, ShardInfo],
    read: Callable[[Sequence[TensorKey]], Iterable[torch.Tensor]],
    *,
    rank: int,
    shard_bytes: int = SHARD_BYTES,
) -> dict[TensorKey, TensorPart]:
    """Write the tensors that ``rank`` writes, as shards of that rank.

    Args:
        writer: of the attempt.
        infos: what is written of each tensor.
        read: called with keys of one section; yields their tensors in that order, each when it is due.
        rank: this rank, by which the files are named.
        shard_bytes: size at which a shard is closed.

    Returns:
        The location of each tensor, for the manifest.
    """
    parts: dict[TensorKey, TensorPart] = {}
    for section in SECTIONS:
        of_section = {name: info for (of, name), info in infos.items() if of == section}
        specs = {name: TensorSpec(info.dtype, info.region.shape) for name, info in of_section.items()}
        for number, group in enumerate(grouped(specs, shard_bytes)):
            file, layout = shard_name(section, rank, number), SafetensorsLayout(group)
            with writer.file(file) as stream:
                layout.write(stream, read([(section, name) for name in layout.names]))
            for name, start in layout.starts.items():
                region = of_section[name].region
                parts[section, name] = TensorPart(file=file, start=start, offsets=region.offsets, shape=region.shape)
    return parts
