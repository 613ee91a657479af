"""Saving one checkpoint: data files first, each with its digests, the manifest last.

Until the manifest exists nothing is visible; once it exists everything under it is complete and durable. A save
that fails leaves what was committed before and takes its own files away. Ranks write at the same time, each its share
of what it holds; the first commits once all are done, or none does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from nxdt_core.checkpoint.assignment import Held, Listing, Place, assign, merge
from nxdt_core.checkpoint.commit import clear_other_attempts, commit, prepare_step, withdraw
from nxdt_core.checkpoint.faults import explained_os_errors
from nxdt_core.checkpoint.files import AttemptWriter
from nxdt_core.checkpoint.layout import (
    SECTIONS,
    attempt_prefix,
    digests_name,
    new_attempt,
    state_name,
    step_name,
    step_prefix,
)
from nxdt_core.checkpoint.manifest import CheckpointFacts, FileEntry, Manifest, encode_facts
from nxdt_core.checkpoint.pieces import list_pieces
from nxdt_core.checkpoint.shards import write_pieces
from nxdt_core.checkpoint.state_tree import encode_tree
from nxdt_core.checkpoint.tensor_index import TensorPart
from nxdt_core.checkpoint.together import on_first_rank, rank_of, together
from nxdt_core.errors import CheckpointFilesMissing
from nxdt_core.protocols.checkpoint_storage import CheckpointStorage
from nxdt_core.protocols.piece import Piece
from nxdt_core.protocols.ranks import RankAgreement

__all__ = ["encode_state", "save_checkpoint", "save_listed"]


def save_checkpoint(
    storage: CheckpointStorage,
    *,
    step: int,
    model: Mapping[str, torch.Tensor | Piece],
    optimizer: Mapping[str, torch.Tensor | Piece],
    state: Mapping[str, Any],
    facts: CheckpointFacts,
    ranks: RankAgreement | None = None,
    before_commit: Callable[[], None] | None = None,
) -> Manifest:
    """Save everything under ``step`` and commit it. A step that is committed already is replaced.

    Collective: it succeeds on all ranks or fails on all. Ranks may hold different tensors (stages of a pipeline) and
    different parts of one (DTensors); what several hold alike is written by one of them.

    Args:
        storage: where to; every rank reaches the same store.
        step: the number of optimizer steps done.
        model: parameters and buffers by their global names.
        optimizer: ``<parameter name>/<state name>`` → tensor.
        state: of this rank: JSON-able tree with plain tensors as leaves: positions, random states, schedules.
        facts: what goes into the manifest beside; that of rank 0 counts.
        ranks: of the run; None for a process that is alone.
        before_commit: called on rank 0 once every file is durable, directly before the manifest is written. What it
            raises fails the save on all ranks, and nothing is committed.

    Raises:
        UnsavableState: a value is neither JSON-able nor a tensor with plain bytes; nothing was written.
        StorageFull, StorageDenied, StorageError: the store failed; committed checkpoints are as they were, and what
            this save wrote is deleted as far as the store lets it.
        CheckpointConflict: another run committed the same step meanwhile.
        CheckpointFilesMissing: rank 0 does not see what others wrote.
    """
    rank = rank_of(ranks)
    prepared: list[_Share] = []

    def prepare() -> Listing:
        prepared.append(_prepare(model, optimizer, state, rank))
        return prepared[0].listing

    return save_listed(
        storage,
        step=step,
        prepare=prepare,
        write=lambda writer, mine: _write(writer, prepared[0], mine, rank),
        facts=facts,
        ranks=ranks,
        before_commit=before_commit,
    )


def save_listed(
    storage: CheckpointStorage,
    *,
    step: int,
    prepare: Callable[[], Listing],
    write: Callable[[AttemptWriter, AbstractSet[Place]], Mapping[Place, TensorPart]],
    facts: CheckpointFacts,
    ranks: RankAgreement | None = None,
    before_commit: Callable[[], None] | None = None,
) -> Manifest:
    """As :func:`save_checkpoint`, for tensors that need not be in memory all at once. Collective.

    Args:
        storage: where to; every rank reaches the same store.
        step: the number of optimizer steps done.
        prepare: checks everything before anything is written, and returns what this rank can write.
        write: writes, of that, the tensors that were given to this rank; returns where each lies.
        facts: what goes into the manifest beside; that of rank 0 counts.
        ranks: of the run; None for a process that is alone.
        before_commit: as of :func:`save_checkpoint`.
    """
    where, rank = f"{storage.uri}/{step_name(step)}", rank_of(ranks)

    def check_and_list() -> Listing:
        encode_facts(facts)
        return prepare()

    listings = together(ranks, check_and_list, where=where)
    mine = assign(listings)[rank]
    replaces: list[bytes | None] = []

    def begin() -> tuple[str, str]:
        if rank == 0:
            with explained_os_errors(where):
                replaces.append(prepare_step(storage, step))
        return new_attempt(), datetime.now(UTC).isoformat(timespec="seconds")

    attempt, created = together(ranks, begin, where=where)[0]

    def write_share() -> _Written:
        with explained_os_errors(where):
            writer = AttemptWriter(storage, attempt_prefix(step, attempt))
            return _Written(parts=write(writer, mine), files=writer.entries)

    try:
        written = together(ranks, write_share, where=where)
        manifest = Manifest(
            step=step,
            attempt=attempt,
            created=created,
            facts=facts,
            files={name: entry for each in written for name, entry in each.files.items()},
            tensors=merge(listings, [each.parts for each in written], SECTIONS),
        )
        on_first_rank(ranks, lambda: _commit(storage, manifest, replaces[0], ranks, before_commit), where=where)
    except BaseException:
        if rank == 0:
            withdraw(storage, step, attempt)
        raise
    on_first_rank(ranks, lambda: _finish(storage, manifest), where=where)
    return manifest


@dataclass(frozen=True, slots=True)
class _Share:
    """What one rank brings to a save."""

    pieces: Mapping[Place, Piece]
    listing: Listing
    state: bytes
    """JSON of the rank's state; its tensors are among the pieces."""


@dataclass(frozen=True, slots=True)
class _Written:
    """What one rank wrote."""

    files: Mapping[str, FileEntry]
    parts: Mapping[Place, TensorPart]


def _prepare(
    model: Mapping[str, torch.Tensor | Piece],
    optimizer: Mapping[str, torch.Tensor | Piece],
    state: Mapping[str, Any],
    rank: int,
) -> _Share:
    """Check everything of this rank, before anything is written anywhere."""
    state_tensors: dict[str, torch.Tensor] = {}
    encoded = encode_state(state, state_tensors, rank)
    pieces: dict[Place, Piece] = {}
    listing: dict[Place, Held] = {}
    for section, tensors in zip(SECTIONS, (model, optimizer, state_tensors), strict=True):
        own, held = list_pieces(section, tensors)
        pieces |= {(section, name): piece for name, piece in own.items()}
        listing |= {(section, name): each for name, each in held.items()}
    return _Share(pieces, listing, encoded)


def encode_state(state: Mapping[str, Any], tensors: dict[str, torch.Tensor], rank: int) -> bytes:
    """The JSON of ``state``; its tensors are put into ``tensors`` under names that begin with the rank."""

    def put_tensor(at: str, value: object) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        name = f"rank-{rank:05d}{at}"
        tensors[name] = value
        return name

    return json.dumps(encode_tree(state, put_tensor=put_tensor), separators=(",", ":"), allow_nan=False).encode()


def _write(writer: AttemptWriter, share: _Share, mine: AbstractSet[Place], rank: int) -> dict[Place, TensorPart]:
    """Write this rank's state and those of its pieces that it was given to write."""
    parts: dict[Place, TensorPart] = {}
    for section in SECTIONS:
        chosen = {name: piece for (of, name), piece in share.pieces.items() if of == section and (of, name) in mine}
        parts |= {(section, name): part for name, part in write_pieces(writer, section, chosen, rank=rank).items()}
    with writer.file(state_name(rank)) as stream:
        stream.write(share.state)
    return parts


def _commit(
    storage: CheckpointStorage,
    manifest: Manifest,
    replaces: bytes | None,
    ranks: RankAgreement | None,
    before_commit: Callable[[], None] | None,
) -> None:
    with explained_os_errors(f"{storage.uri}/{step_name(manifest.step)}"):
        if ranks is not None and ranks.world_size > 1:
            _check_visible(storage, manifest)
        if before_commit is not None:
            before_commit()
        commit(storage, manifest, replaces)


def _check_visible(storage: CheckpointStorage, manifest: Manifest) -> None:
    """Files that other ranks wrote to their own machine's disk are no part of a checkpoint that is committed here."""
    wanted = {name: entry.size_bytes for name, entry in manifest.files.items()}
    wanted |= {digests_name(name): entry.digests_bytes for name, entry in manifest.files.items()}
    found = {info.key: info.size_bytes for info in storage.list(manifest.prefix)}
    missing = [name for name, size in wanted.items() if found.get(manifest.prefix + name) != size]
    if missing:
        reason = f"rank 0 does not see {len(missing)} of {len(wanted)} files that the ranks wrote, first {missing[0]}"
        raise CheckpointFilesMissing(where=f"{storage.uri}/{manifest.prefix}", reason=reason)


def _finish(storage: CheckpointStorage, manifest: Manifest) -> None:
    clear_other_attempts(storage, manifest)
    with explained_os_errors(f"{storage.uri}/{step_name(manifest.step)}"):
        storage.after_commit(step_prefix(manifest.step))
