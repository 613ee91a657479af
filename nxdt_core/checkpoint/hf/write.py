"""Writing a Hugging Face directory file by file: of the weights no more than one file a worker is in memory.

What is complete shows by ``config.json``, which comes last. An export that was interrupted leaves a note of what it
was; the same export resumes where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch

from nxdt_core.checkpoint.collective import on_all_ranks, on_first_rank, rank_of
from nxdt_core.checkpoint.format.manifest import Manifest
from nxdt_core.checkpoint.format.safetensors_stream import Writable
from nxdt_core.checkpoint.format.tensor_index import TensorEntry
from nxdt_core.checkpoint.hf.export_plan import HFPlan, HFShard
from nxdt_core.checkpoint.os_errors import explained_os_errors
from nxdt_core.checkpoint.read.boxes import fill
from nxdt_core.errors.models import HFNotWritable
from nxdt_core.protocols.piece import Piece
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore

__all__ = ["NOTE", "read_from", "write_hf", "write_shards"]

NOTE = "nxdt-export-unfinished"
"""Is in a directory until its export is complete; says what is exported there."""

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
        pieces = {
            name: Piece(
                torch.empty(tensor.box.shape, dtype=getattr(torch, shard.specs[name].dtype)),
                tensor.parameter_shape,
                tensor.box,
            )
            for name, tensor in shard.tensors.items()
        }
        owners = {name: places[tensor.parameter] for name, tensor in shard.tensors.items()}
        entries = {name: entry if entry.same_as is None else places[entry.same_as] for name, entry in owners.items()}
        with explained_os_errors(f"{storage.uri}/{manifest.prefix}model"):
            fill(storage, manifest, pieces, entries)
        return {name: tensor.of(pieces[name].tensor) for name, tensor in shard.tensors.items()}

    return read


def _begin(storage: CheckpointStore, note: bytes) -> Mapping[str, int]:
    """Sizes by name of what an earlier, equal export has written."""
    with explained_os_errors(storage.uri):
        found = {info.key: info.size_bytes for info in storage.list()}
        if not found:
            with storage.open_write(NOTE) as stream:
                stream.write(note)
        elif NOTE not in found:
            raise HFNotWritable(directory=storage.uri)
        else:
            with storage.open_read(NOTE) as stream:
                if stream.read() != note:
                    raise HFNotWritable(directory=storage.uri)
        return found


def _finish(storage: CheckpointStore, plan: HFPlan) -> None:
    with explained_os_errors(storage.uri):
        for name, content in plan.texts.items():
            with storage.open_write(name) as stream:
                stream.write(content)
        storage.delete_many([NOTE])
