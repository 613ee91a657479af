"""Loading: every byte that is used was compared with its digest; nothing is ever unpickled.

Whole tensors onto the host, for one process that wants all of them; or into what a rank holds, in any layout.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from nxdt_core.checkpoint.collective import on_all_ranks, on_this_rank
from nxdt_core.checkpoint.format.digested_files import (
    VerifiedFile,
    Wanted,
    check_header,
    check_size,
    read_whole,
    tensors_by_file,
)
from nxdt_core.checkpoint.format.file_names import is_state_name, state_name
from nxdt_core.checkpoint.format.manifest import Manifest, decode_rank_state, state_tensors
from nxdt_core.checkpoint.format.shards import TensorSpec, bytes_of, empty_like, filled_up, grouped, storable_shard
from nxdt_core.checkpoint.format.tensor_index import ITEM_BYTES, TensorEntry
from nxdt_core.checkpoint.storage import explained_os_errors
from nxdt_core.distributed.buckets import buckets
from nxdt_core.distributed.devices import profile_of
from nxdt_core.distributed.placement import local_shard_of
from nxdt_core.errors.checkpoints import CheckpointDamaged, TensorNotInCheckpoint
from nxdt_core.errors.models import WeightsDoNotFit
from nxdt_core.errors.training import OptimizerStateDoesNotFit
from nxdt_core.models.quantised import QuantisedWeight
from nxdt_core.protocols.parallel_model import Replicas
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.protocols.tensor_shards import LocalShard, TensorSlice

_AT_ONCE_BYTES = 256 * 2**20
"""Buffers, and tensors of :func:`iterate_model`, at a time (more where a single tensor needs it): each batch parses
headers, and reads and verifies the blocks that it touches once."""


@dataclass(frozen=True, slots=True)
class _Read:
    """Rows of a part, and the destination of those elements of them that are wanted."""

    file: str
    start: int
    buffer: torch.Tensor
    """Whole rows; the target's own memory where :attr:`copy_to` is None."""
    copy_to: torch.Tensor | None = None
    row_slices: tuple[slice, ...] = ()


@torch.no_grad()
def fill(
    storage: CheckpointStore, manifest: Manifest, wanted: Mapping[str, LocalShard], entries: Mapping[str, TensorEntry]
) -> None:
    """Fill the shards ``wanted`` in place; only blocks that hold elements of them are read.

    Args:
        storage: the store that holds the checkpoint.
        manifest: the manifest of the checkpoint.
        wanted: shards by name; their dtype and device may differ from the checkpoint's, their whole shape may not.
        entries: the location of each tensor by name; no two tensors share bytes.

    Raises:
        CheckpointDamaged: a file is not what was written.
    """
    files: dict[str, VerifiedFile] = {}
    needed = {part.file for entry in entries.values() for part in entry.parts}
    stored = tensors_by_file(manifest, needed)
    sized = lambda read: 0 if read.copy_to is None else read.buffer.nbytes  # noqa: E731
    for batch in buckets(_reads(wanted, entries), sized, _AT_ONCE_BYTES):
        ranges: dict[str, list[Wanted]] = defaultdict(list)
        for read in batch:
            ranges[read.file].append(Wanted(read.start, bytes_of(read.buffer)))
        for name, chosen in ranges.items():
            if name not in files:
                files[name] = VerifiedFile(storage, manifest, name)
                check_header(files[name], stored[name])
            files[name].read(chosen)
        for read in batch:
            if read.copy_to is not None:
                read.copy_to.copy_(read.buffer[read.row_slices])


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


def _reads(wanted: Mapping[str, LocalShard], entries: Mapping[str, TensorEntry]) -> Iterator[_Read]:
    """Yield how to read what each part has of a shard: the rows (first dimension) that it spans."""
    for name, shard in wanted.items():
        dtype_name = entries[name].dtype
        dtype = getattr(torch, dtype_name)
        for part in entries[name].parts:
            inner = TensorSlice(part.offsets, part.shape)
            common = shard.region.intersection(inner)
            if common is None:
                continue
            first = common.offsets[0] - part.offsets[0] if common.shape else 0
            start = part.start + first * math.prod(part.shape[1:]) * ITEM_BYTES[dtype_name]
            target = shard.tensor[common.within(shard.region)]
            whole_rows = common.shape[1:] == part.shape[1:]
            if whole_rows and target.dtype == dtype and profile_of(target.device).host and target.is_contiguous():
                yield _Read(part.file, start, target)
                continue
            buffer = torch.empty((common.shape[0], *part.shape[1:]) if part.shape else (), dtype=dtype)
            row_slices = (slice(None), *common.within(inner)[1:]) if part.shape else ()
            yield _Read(part.file, start, buffer, target, row_slices)


def iterate_model(storage: CheckpointStore, manifest: Manifest, names: Sequence[str]) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers in the order of ``names``, whole and on the host.

    256 MiB of them, or a larger one alone, are in memory at a time.

    Raises:
        CheckpointDamaged: a file is not what was written; the error names it.
        TensorNotInCheckpoint: one of ``names`` was not saved.
    """
    index = manifest.tensors.get("model", {})
    _require(storage, manifest, "model", names)
    specs = {name: TensorSpec(index[name].dtype, index[name].shape) for name in names}
    for group in grouped(specs, _AT_ONCE_BYTES):
        tensors = load_model(storage, manifest, group)
        for name in group:
            yield tensors.pop(name)


def load_model(
    storage: CheckpointStore, manifest: Manifest, names: Iterable[str] | None = None
) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers by name, whole and on the host; only ``names`` where given, and then only their
    bytes are read.

    Tensors that were tied when saved are one object.

    Raises:
        CheckpointDamaged: a file is not what was written; the error names it.
        TensorNotInCheckpoint: one of ``names`` was not saved.
    """
    return read_tensors(storage, manifest, "model", names)


def load_optimizer(
    storage: CheckpointStore, manifest: Manifest, names: Iterable[str] | None = None
) -> dict[str, torch.Tensor]:
    """Return the ``<parameter name>/<state name>`` → tensor; otherwise as :func:`load_model`."""
    return read_tensors(storage, manifest, "optim", names)


def load_model_into(
    storage: CheckpointStore,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor | LocalShard],
    *,
    ranks: RankAgreement | None = None,
    replicas: Replicas | None = None,
    strict: bool = True,
    table_rows: int | None = None,
) -> tuple[list[str], list[str]]:
    """Fill in place the parameters and buffers that each rank holds; the layout of the save does not matter.

    Collective: it succeeds on all ranks or fails on all.

    Args:
        storage: the store that holds the checkpoint.
        manifest: the manifest of the checkpoint.
        tensors: tensors of this rank by global name; DTensors or shards where they are sharded.
        ranks: the ranks of the run; None for a single process.
        replicas: ranks that read the data once for all of them; None where each reads what it holds.
        strict: refuse where names differ; otherwise tensors that the checkpoint lacks stay unchanged.
        table_rows: rows of tables of which the checkpoint may have fewer; the others become the mean of those. None
            refuses tensors with fewer rows.

    Returns:
        The parameters that the checkpoint lacks, and those of the checkpoint that the model lacks, over all ranks.

    Raises:
        WeightsDoNotFit: on some rank shapes, or under ``strict`` names, differ from the checkpoint's; nothing was
            read.
        CheckpointDamaged: a file is not what was written; some tensors may be filled.
    """
    where = f"{storage.uri}/{manifest.prefix}model"
    index = manifest.tensors.get("model", {})
    unmatched = check_model(index, tensors, ranks, strict=strict, table_rows=table_rows)
    present = {name: tensor for name, tensor in tensors.items() if name in index}

    def read() -> None:
        if replicas is None or replicas.reads:
            short = {name: target for name, target in present.items() if index[name].shape != tuple(target.shape)}
            rest = {name: target for name, target in present.items() if name not in short}
            _fill(storage, manifest, index, rest, where)
            for name, target in short.items():  # tables, one of which is whole on the host at a time
                saved = read_tensors(storage, manifest, "model", [name])[name]
                shard = storable_shard(name, target)
                with torch.no_grad():
                    rows = filled_up(saved, shard.shape[0])
                    shard.tensor.copy_(rows[shard.region.within(TensorSlice.whole(shard.shape))])

    on_all_ranks(ranks, read, where=where)
    if replicas is not None:
        replicas.spread(_local_tensors(present))
    return unmatched


def load_optimizer_like(
    storage: CheckpointStore,
    manifest: Manifest,
    parameters: Mapping[str, torch.Tensor | LocalShard],
    *,
    ranks: RankAgreement | None = None,
    replicas: Replicas | None = None,
    strict: bool = True,
) -> dict[str, torch.Tensor | LocalShard]:
    """Return this rank's optimizer state. State with its parameter's shape has the parameter's layout; other state is
    whole, on the host.

    Collective: it succeeds on all ranks or fails on all.

    Args:
        storage: the store that holds the checkpoint.
        manifest: the manifest of the checkpoint.
        parameters: parameters of this rank by global name; DTensors or shards where they are sharded.
        ranks: the ranks of the run; None for a single process.
        replicas: ranks that read the data once for all of them; None where each reads what it holds.
        strict: refuse state of parameters that no rank has; otherwise it is left out.

    Raises:
        OptimizerStateDoesNotFit: the checkpoint has such state, and ``strict`` is set.
        CheckpointDamaged: a file is not what was written.
    """
    where = f"{storage.uri}/{manifest.prefix}optim"
    index = manifest.tensors.get("optim", {})
    if strict:
        names = list(parameters)
        known_names = set(chain.from_iterable([names] if ranks is None else ranks.all_gather_object(names)))
        unknown = sorted({key.rpartition("/")[0] for key in index} - known_names)
        if unknown:
            raise OptimizerStateDoesNotFit(parameters=unknown)
    state: dict[str, torch.Tensor | LocalShard] = {}

    def read() -> None:
        entries = {key: entry for key, entry in index.items() if key.rpartition("/")[0] in parameters}
        check_fits(storage, manifest, entries.values())
        for key, entry in entries.items():
            state[key] = empty_like(parameters[key.rpartition("/")[0]], entry.shape, getattr(torch, entry.dtype))
        _fill(storage, manifest, index, state if replicas is None or replicas.reads else {}, where)

    on_all_ranks(ranks, read, where=where)
    if replicas is not None:
        replicas.spread(_local_tensors(state))
    return state


def load_state(
    storage: CheckpointStore, manifest: Manifest, *, rank: int = 0, ranks: RankAgreement | None = None
) -> dict[str, Any]:
    """Return the state tree that ``rank`` saved, equal in types and values.

    Collective where ``ranks`` are given: it succeeds on all of them or fails on all.

    Raises:
        CheckpointDamaged: a file is not what was written; the error names it.
    """
    name = state_name(rank)
    where = f"{storage.uri}/{manifest.prefix}{name}"

    def read() -> dict[str, Any]:
        with explained_os_errors(where):
            data = read_whole(storage, manifest, name)
            tensors = read_tensors(storage, manifest, "state", state_tensors(manifest, name))
        return decode_rank_state(data, tensors, manifest, where=where)

    return on_this_rank(ranks, read, where=where)


def saved_ranks(manifest: Manifest) -> int:
    """Return the number of ranks that saved the checkpoint."""
    return sum(map(is_state_name, manifest.files))


def read_tensors(
    storage: CheckpointStore, manifest: Manifest, section: str, names: Iterable[str] | None = None
) -> dict[str, torch.Tensor]:
    """Return the named tensors of ``section``, whole and on the host, all of them where ``names`` is None.

    Only blocks that hold asked-for elements are read. Tensors that shared memory when saved are one object again.

    Raises:
        CheckpointDamaged: a file is not what was written.
        TensorNotInCheckpoint: a name is not in the section.
    """
    index = manifest.tensors.get(section, {})
    chosen = list(index) if names is None else list(names)
    _require(storage, manifest, section, chosen)
    owner_of = {name: index[name].same_as or name for name in chosen}
    owners = {owner: index[owner] for owner in owner_of.values()}
    wanted: dict[str, LocalShard] = {}
    with explained_os_errors(f"{storage.uri}/{manifest.prefix}{section}"):
        check_fits(storage, manifest, owners.values())
        for owner, entry in owners.items():
            whole = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            wanted[owner] = LocalShard(whole, entry.shape, TensorSlice.whole(entry.shape))
        fill(storage, manifest, wanted, index)
    return {name: wanted[owner].tensor for name, owner in owner_of.items()}


def _require(storage: CheckpointStore, manifest: Manifest, section: str, names: Iterable[str]) -> None:
    missing = [name for name in names if name not in manifest.tensors.get(section, {})]
    if missing:
        reason = f"no tensor {', '.join(missing[:8])} in its section {section!r}"
        raise TensorNotInCheckpoint(where=f"{storage.uri}/{manifest.prefix}", reason=reason)


def _local_tensors(tensors: Mapping[str, torch.Tensor | LocalShard]) -> list[torch.Tensor]:
    local: list[torch.Tensor] = []
    for name, tensor in tensors.items():
        value = local_shard_of(tensor, name).tensor
        if isinstance(value, QuantisedWeight):
            local += [part for part in value.parts if part.numel()]
        else:
            local.append(storable_shard(name, tensor).tensor)
    return local


def _fill(
    storage: CheckpointStore,
    manifest: Manifest,
    index: Mapping[str, TensorEntry],
    tensors: Mapping[str, torch.Tensor | LocalShard],
    where: str,
) -> None:
    """Fill ``tensors``; those that were the same memory when saved one after the other, for no read takes a byte
    twice. Weights that will be codes are read first, 256 MiB of them or a larger one at a time."""
    local_shards = {name: local_shard_of(target, name) for name, target in tensors.items()}
    coded = {name: shard for name, shard in local_shards.items() if isinstance(shard.tensor, QuantisedWeight)}
    rest = {name: storable_shard(name, tensor) for name, tensor in tensors.items() if name not in coded}
    with explained_os_errors(where):
        specs = {name: TensorSpec(index[name].dtype, shard.region.shape) for name, shard in coded.items()}
        for names in grouped(specs, _AT_ONCE_BYTES):
            read = {
                name: replace(coded[name], tensor=torch.empty(coded[name].region.shape, dtype=coded[name].tensor.dtype))
                for name in names
            }
            fill(storage, manifest, read, index)
            for name, shard in read.items():
                coded[name].tensor.copy_(shard.tensor)
        while rest:
            by_owner = {index[name].same_as or name: name for name in reversed(rest)}
            entries = {name: index[owner] for owner, name in by_owner.items()}
            fill(storage, manifest, {name: rest.pop(name) for name in entries}, entries)


def check_model(
    index: Mapping[str, TensorEntry],
    tensors: Mapping[str, torch.Tensor | LocalShard],
    ranks: RankAgreement | None,
    *,
    strict: bool = True,
    table_rows: int | None = None,
) -> tuple[list[str], list[str]]:
    """Compare the names and whole shapes of ``tensors``, this rank's, with ``index``; otherwise as
    :func:`load_model_into`.

    Collective.

    Raises:
        WeightsDoNotFit: shapes differ; or, if ``strict``, a rank lacks something in the checkpoint, or the checkpoint
            has what no rank asks for; the same on every rank.
    """
    local_shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    gathered = [local_shapes] if ranks is None else ranks.all_gather_object(local_shapes)
    all_shapes = dict(chain.from_iterable(rank_shapes.items() for rank_shapes in gathered))
    missing = [name for name in all_shapes if name not in index]
    extra = [name for name in index if name not in all_shapes]
    shapes = []
    for name, shape in all_shapes.items():
        saved = index[name].shape if name in index else shape
        lacks_rows = shape[:1] == (table_rows,) and saved[1:] == shape[1:] and 0 < saved[0] < shape[0]
        if saved != shape and not lacks_rows:
            shapes.append(f"{name}: {saved} instead of {shape}")
    if shapes or (strict and (missing or extra)):
        raise WeightsDoNotFit(missing=missing, extra=extra, shapes=shapes)
    return missing, extra
