"""A door for other programs: ``torch.distributed.checkpoint`` reads a section of a checkpoint by its own planner.

Any program with a state dict of plain tensors or DTensors, in any layout, loads weights that a run has saved::

    storage, step = locate("runs/a/checkpoints/step-00000100")
    reader = NxdtReader(storage, read_manifest(storage, step))
    dcp.load(state_dict, storage_reader=reader)

Only the blocks that hold something of what a rank asks for are read; each is compared with its digest before a byte of
it is used, and nothing is unpickled. What fails comes out as torch's ``CheckpointException``, which holds the error of
each rank.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from nxdt_core.checkpoint.format.manifest import Manifest
from nxdt_core.checkpoint.format.tensor_index import TensorEntry
from nxdt_core.checkpoint.read.boxes import fill
from nxdt_core.checkpoint.storage import explained_os_errors
from nxdt_core.protocols.piece import Box, Piece
from nxdt_core.protocols.store import CheckpointStore

__all__ = ["NxdtReader"]


class NxdtReader(StorageReader):
    """Reads the tensors of one section of a committed checkpoint.

    Args:
        storage: the store that holds the checkpoint; every rank can reach it.
        manifest: the manifest of the checkpoint.
        section: ``model``; or ``optim``, whose keys are ``<parameter name>/<state name>``; or ``state``.
    """

    def __init__(self, storage: CheckpointStore, manifest: Manifest, section: str = "model") -> None:
        self._storage = storage
        self._manifest = manifest
        self._index = manifest.tensors.get(section, {})
        self._where = f"{storage.uri}/{manifest.prefix}{section}"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the checkpoint was named when this was constructed."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the tensors, one chunk per part; a tensor that shared another's memory has that one's
        chunks."""
        return Metadata(state_dict_metadata={name: _metadata(self._entry(name)) for name in self._index})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what this rank asks for; done when it returns.

        Raises:
            CheckpointDamaged: a file is not what was written; the error names it.
        """
        rest: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            rest[item.storage_index.fqn].append(item)
        while rest:  # no read takes a byte twice, as tensors that shared memory would
            by_owner = {self._index[name].same_as or name: name for name in rest}
            self._fill([item for name in by_owner.values() for item in rest.pop(name)], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by an address alone."""
        return False

    def _fill(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        targets: dict[str, torch.Tensor] = {}
        pieces: dict[str, Piece] = {}
        entries: dict[str, TensorEntry] = {}
        for number, item in enumerate(items):
            key, entry = str(number), self._entry(item.storage_index.fqn)
            target = planner.resolve_tensor(item).detach()
            chunk = item.storage_index.offset or (0,) * len(entry.shape)
            offsets = tuple(start + inner for start, inner in zip(chunk, item.storage_offsets, strict=True))
            targets[key], entries[key] = target, entry
            pieces[key] = Piece(target, entry.shape, Box(offsets, tuple(item.lengths)))
        with explained_os_errors(self._where):
            fill(self._storage, self._manifest, pieces, entries)
        for number, item in enumerate(items):
            planner.commit_tensor(item, targets[str(number)])

    def _entry(self, name: str) -> TensorEntry:
        entry = self._index[name]
        return self._index[entry.same_as] if entry.same_as else entry


def _metadata(entry: TensorEntry) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, entry.dtype)),
        size=torch.Size(entry.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(part.offsets), sizes=torch.Size(part.shape)) for part in entry.parts
        ],
    )
