"""Checkpoints through ``torch.distributed.checkpoint``, for other programs: ``dcp.load`` and ``dcp.save``.

Any program with a state dict of plain tensors or DTensors, in any layout, loads weights that a run has saved::

    storage, step = locate("runs/a/checkpoints/step-00000100")
    reader = NxdtReader(storage, read_manifest(storage, step))
    dcp.load(state_dict, storage_reader=reader)

Only the blocks that hold something of what a rank asks for are read. Each is compared with its digest before a byte of
it is used, and nothing is unpickled. A failure is torch's ``CheckpointException``, which holds the error of each rank.

What ``dcp.save`` writes is read by every command here::

    dcp.save(model.state_dict(), storage_writer=NxdtWriter(open_storage("runs/a/checkpoints"), step=100))

All ranks write shards with digests, and the coordinator commits them by one manifest. Only tensors are saved: an error
names the key of what torch would pickle. There is one section and no state of ranks, so that a run can begin with the
weights, but not resume.

No code of the core uses this module: it reads and writes by the format alone.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from nxdt_core.checkpoint.commit import clear_other_attempts, commit, prepare_step
from nxdt_core.checkpoint.format.digested_files import AttemptWriter
from nxdt_core.checkpoint.format.digests import FAST, Algorithm
from nxdt_core.checkpoint.format.file_names import attempt_prefix, new_attempt, step_name, step_prefix
from nxdt_core.checkpoint.format.manifest import CheckpointFacts, FileEntry, Manifest
from nxdt_core.checkpoint.format.shards import write_pieces
from nxdt_core.checkpoint.format.tensor_index import TensorEntry, TensorPart
from nxdt_core.checkpoint.pieces import dtype_name, storable_piece
from nxdt_core.checkpoint.read.boxes import fill
from nxdt_core.checkpoint.signing import Signer
from nxdt_core.checkpoint.storage import explained_os_errors
from nxdt_core.errors.checkpoints import UnsavableState
from nxdt_core.protocols.piece import Box, Piece
from nxdt_core.protocols.store import CheckpointStore


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


@dataclass(frozen=True, slots=True)
class _Turn:
    """What the coordinator sends to one rank."""

    attempt: str
    rank: int


@dataclass(frozen=True, slots=True)
class _Written:
    """The location of one item."""

    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    part: TensorPart
    file: FileEntry


class NxdtWriter(StorageWriter):
    """Writes a state dict of tensors as one section of a checkpoint. Each instance performs one save.

    Files of a save that failed are cleared by the next save of the step.

    Args:
        storage: the store to write to; every rank can reach it.
        step: the number of optimizer steps done. A step that is committed already is replaced.
        facts: further entries of the manifest; those of the coordinator count.
        section: ``model``, or ``optim``.
        signer: signs the manifest, on the coordinator; given on all ranks or on none.
    """

    def __init__(
        self,
        storage: CheckpointStore,
        step: int,
        *,
        facts: CheckpointFacts | None = None,
        section: str = "model",
        signer: Signer | None = None,
    ) -> None:
        self._storage = storage
        self._step = step
        self._facts = facts or CheckpointFacts()
        self._section = section
        self._signer = signer
        self._digests: Algorithm = FAST if signer is None else signer.digests
        self._where = f"{storage.uri}/{step_name(step)}"
        self._attempt = ""
        self._replaces: bytes | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the store was named when this was constructed."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what torch would pickle.

        Raises:
            UnsavableState: an item is not a tensor.
        """
        for item in plan.items:
            if item.tensor_data is None:
                raise UnsavableState(where=item.index.fqn, reason="it is not a tensor")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give all ranks the name of one attempt. Called on the coordinator alone, as :meth:`finish` is."""
        with explained_os_errors(self._where):
            self._replaces = prepare_step(self._storage, self._step)
        self._attempt = new_attempt()
        return [replace(plan, storage_data=_Turn(self._attempt, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards; done when it returns.

        Raises:
            TensorStateUnsupported: a tensor has no plain bytes.
            StorageError: the store failed.
        """
        turn: _Turn = plan.storage_data
        items = {f"{item.index.fqn}@{number}": item for number, item in enumerate(plan.items)}
        pieces = {key: _piece(item, planner) for key, item in items.items()}
        with explained_os_errors(self._where):
            writer = AttemptWriter(self._storage, attempt_prefix(self._step, turn.attempt), self._digests)
            parts = write_pieces(writer, self._section, pieces, rank=turn.rank)
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(
                    index=items[key].index,
                    size_in_bytes=pieces[key].tensor.nbytes,
                    storage_data=_Written(
                        dtype_name(pieces[key].tensor), pieces[key].shape, part, writer.entries[part.file]
                    ),
                )
                for key, part in parts.items()
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks wrote.

        Raises:
            CheckpointConflict: another run committed the same step meanwhile.
            StorageError: the store failed.
        """
        written: dict[str, list[_Written]] = defaultdict(list)
        for result in (result for each in results for result in each):
            written[result.index.fqn].append(result.storage_data)
        manifest = Manifest(
            step=self._step,
            attempt=self._attempt,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            facts=self._facts,
            files={item.part.file: item.file for items in written.values() for item in items},
            tensors={self._section: {name: _entry(items) for name, items in written.items()}},
            digests=self._digests,
        )
        with explained_os_errors(self._where):
            commit(self._storage, manifest, self._replaces, signer=self._signer)
            clear_other_attempts(self._storage, manifest)
            self._storage.after_commit(step_prefix(self._step))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by an address alone."""
        return False


def _piece(item: WriteItem, planner: SavePlanner) -> Piece:
    tensor = planner.resolve_data(item)
    assert item.tensor_data is not None
    assert isinstance(tensor, torch.Tensor)
    chunk = item.tensor_data.chunk
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    return storable_piece(item.index.fqn, Piece(tensor, tuple(item.tensor_data.size), box))


def _entry(items: Sequence[_Written]) -> TensorEntry:
    parts = sorted((item.part for item in items), key=lambda part: part.offsets)
    return TensorEntry(dtype=items[0].dtype, shape=items[0].shape, parts=tuple(parts))
