"""Hugging Face directories: ``config.json`` with safetensors weights, read and written whole.

What the names of tensors mean is the business of a builder's key map
(``ModelBuilder.hf_key_map``). Writing holds no more than one file of weights per worker in memory.
``config.json`` comes last and shows that the directory is complete. An export that was interrupted leaves a note of
what it was; the same export resumes where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from nxdt_core.checkpoint.collective import on_all_ranks, on_first_rank, rank_of
from nxdt_core.checkpoint.format.hf_source import CONFIG, read_json
from nxdt_core.checkpoint.format.manifest import Manifest
from nxdt_core.checkpoint.format.shards import TensorSpec, Writable
from nxdt_core.checkpoint.format.tensor_index import TensorEntry
from nxdt_core.checkpoint.pieces import dtype_name
from nxdt_core.checkpoint.read.boxes import fill
from nxdt_core.checkpoint.storage import explained_os_errors, open_storage
from nxdt_core.errors.models import HFNotWritable
from nxdt_core.hf.export import MAX_SHARD_BYTES, HFPlan, HFShard, plan_hf
from nxdt_core.hf.key_map import HFTensor, room_for
from nxdt_core.hf.reader import HFWeights
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.piece import Box, Piece
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.protocols.tokenizer import Tokenizer

__all__ = ["NOTE", "iterate_hf", "load_hf", "read_from", "read_hf_config", "save_hf", "write_hf", "write_shards"]


NOTE = "nxdt-export-unfinished"
"""Name of the file that is in a directory until its export is complete; says what is exported there."""

ReadShard = Callable[[HFShard], dict[str, torch.Tensor]]
"""Gives the tensors of one file by name, in its dtypes and shapes."""


def write_hf(
    storage: CheckpointStore,
    plan: HFPlan,
    read: ReadShard,
    *,
    origin: str,
    workers: int = 1,
    ranks: RankAgreement | None = None,
) -> None:
    """Write the whole directory to the root of ``storage``. Collective: ranks divide the files of weights.

    Args:
        storage: of the directory; must be empty, or hold what an interrupted export of the same left.
        plan: of the directory; equal on all ranks.
        read: where the weights come from.
        origin: says which weights these are; no others have the same.
        workers: files that each rank writes at the same time.
        ranks: of the export; None for a process that is alone.

    Raises:
        HFNotWritable: the directory holds something else.
        StorageError: a store failed; the same call resumes.
    """
    note = f"{origin}\n{plan.digest()}\n".encode()
    done = on_all_ranks(ranks, lambda: _begin(storage, note) if rank_of(ranks) == 0 else {}, where=storage.uri)[0]
    left = [shard for shard in plan.shards if done.get(shard.file) != shard.layout.size_bytes]
    mine = left if ranks is None else left[ranks.rank :: ranks.world_size]

    def write() -> None:
        with explained_os_errors(storage.uri):
            write_shards(storage.open_write, mine, read, workers=workers)

    on_all_ranks(ranks, write, where=storage.uri)
    on_first_rank(ranks, lambda: _finish(storage, plan), where=storage.uri)


def write_shards(
    open_file: Callable[[str], AbstractContextManager[Writable]],
    shards: Sequence[HFShard],
    read: ReadShard,
    *,
    workers: int = 1,
) -> None:
    """Write files of weights, each by the name that the plan gives it, ``workers`` of them at the same time."""

    def write(shard: HFShard) -> None:
        tensors, layout = read(shard), shard.layout
        with open_file(shard.file) as stream:
            layout.write(stream, (tensors.pop(name) for name in layout.names))

    with ThreadPoolExecutor(workers) as pool:
        try:
            list(pool.map(write, shards))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def read_from(
    storage: CheckpointStore, manifest: Manifest, index: Mapping[str, TensorEntry] | None = None
) -> ReadShard:
    """Return a function that reads and verifies the parts of parameters that a file needs, from an nxdt checkpoint.

    ``index``: locations of the tensors by name; None uses those of the model.
    """
    places = manifest.tensors.get("model", {}) if index is None else index

    def read(shard: HFShard) -> dict[str, torch.Tensor]:
        pieces, owners, made = {}, {}, {}
        for name, parts in shard.tensors.items():
            boxes, made[name] = room_for(parts, getattr(torch, shard.specs[name].dtype))
            for part, box in zip(parts, boxes, strict=True):
                key = f"{name} of {part.parameter}"
                pieces[key], owners[key] = Piece(box, part.parameter_shape, part.box), places[part.parameter]
        entries = {key: entry if entry.same_as is None else places[entry.same_as] for key, entry in owners.items()}
        with explained_os_errors(f"{storage.uri}/{manifest.prefix}model"):
            fill(storage, manifest, pieces, entries)
        return {name: make() for name, make in made.items()}

    return read


def _begin(storage: CheckpointStore, note: bytes) -> Mapping[str, int]:
    """Sizes by name of what an earlier, equal export has written."""
    with explained_os_errors(storage.uri):
        sizes = {info.key: info.size_bytes for info in storage.list()}
        if not sizes:
            with storage.open_write(NOTE) as stream:
                stream.write(note)
        elif NOTE not in sizes:
            raise HFNotWritable(directory=storage.uri)
        else:
            with storage.open_read(NOTE) as stream:
                if stream.read() != note:
                    raise HFNotWritable(directory=storage.uri)
        return sizes


def _finish(storage: CheckpointStore, plan: HFPlan) -> None:
    with explained_os_errors(storage.uri):
        for name, content in plan.texts.items():
            with storage.open_write(name) as stream:
                stream.write(content)
        storage.delete_many([NOTE])


def read_hf_config(directory: str | Path) -> dict[str, Any]:
    """Return the ``config.json`` of ``directory``.

    Raises:
        HFFileMissing: there is none.
        HFFileDamaged: it is not a JSON object.
    """
    return read_json(Path(directory), CONFIG)


def load_hf(directory: str | Path, builder: ModelBuilder) -> dict[str, torch.Tensor]:
    """Return all parameters by global name, on the CPU, in the dtype of the files; a tied one once, under its owner's
    name.

    Raises:
        HFExchangeUnsupported: the builder has no key map.
        HFFileMissing: the directory or its weights are not there.
        HFFileDamaged: a file is truncated or no safetensors file.
        WeightsDoNotFit: names or shapes are not those of the builder's model.
    """
    return dict(iterate_hf(directory, builder))


def iterate_hf(directory: str | Path, builder: ModelBuilder) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of :func:`load_hf`, one in memory at a time; names are checked before the first is read."""
    with HFWeights(Path(directory)) as weights:
        for source in weights.sources(builder):
            yield source.name, weights.read(source)


def save_hf(
    directory: str | Path,
    builder: ModelBuilder,
    state_dict: Mapping[str, torch.Tensor],
    tokenizer: Tokenizer | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write ``config.json`` and the weights so that ``AutoModelForCausalLM.from_pretrained`` loads them.

    Args:
        directory: created if it does not exist; otherwise it must be empty.
        builder: provides the configuration and the names.
        state_dict: all parameters by global name, whole; copies of tied ones are left out.
        tokenizer: its special ids go into ``config.json``; without one they are null there.
        max_shard_bytes: limit of one weights file; a larger tensor gets a separate file.

    Raises:
        HFExchangeUnsupported: the builder has no key map.
        HFNotWritable: the directory holds something already.
        WeightsDoNotFit: ``state_dict`` does not match the builder's model.
    """
    specs = {name: TensorSpec(dtype_name(tensor), tuple(tensor.shape)) for name, tensor in state_dict.items()}
    plan = plan_hf(builder, specs, tokenizer, max_shard_bytes=max_shard_bytes)
    storage = open_storage(str(directory))
    if next(storage.list(), None) is not None:
        raise HFNotWritable(directory=str(directory))

    def read(shard: HFShard) -> dict[str, torch.Tensor]:
        return {name: _made(parts, state_dict) for name, parts in shard.tensors.items()}

    write_hf(storage, plan, read, origin="memory")


def _made(parts: Sequence[HFTensor], state_dict: Mapping[str, torch.Tensor]) -> torch.Tensor:
    boxes = [state_dict[part.parameter][part.box.within(Box.whole(part.parameter_shape))] for part in parts]
    if len(parts) == 1:
        return parts[0].of(boxes[0])
    targets, make = room_for(parts, boxes[0].dtype)
    for target, box in zip(targets, boxes, strict=True):
        target.copy_(box)
    return make()
