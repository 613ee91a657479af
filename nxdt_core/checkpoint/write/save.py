"""Saving one checkpoint: data files first, each with its digests, the manifest last.

Until the manifest exists nothing is visible; once it exists everything under it is complete and durable. A save
that fails leaves what was committed before and takes its own files away. Ranks write at the same time, each its share
of what it holds; the first commits once all are done, or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch

from nxdt_core.checkpoint.collective import on_all_ranks, on_first_rank, rank_of
from nxdt_core.checkpoint.format.digested_files import AttemptWriter
from nxdt_core.checkpoint.format.digests import FAST
from nxdt_core.checkpoint.format.file_names import (
    SECTIONS,
    attempt_prefix,
    digests_name,
    new_attempt,
    step_name,
    step_prefix,
)
from nxdt_core.checkpoint.format.manifest import CheckpointFacts, FileEntry, Manifest, encode_facts
from nxdt_core.checkpoint.format.tensor_index import TensorPart
from nxdt_core.checkpoint.os_errors import explained_os_errors
from nxdt_core.checkpoint.signing import Signer
from nxdt_core.checkpoint.write.assignment import merge
from nxdt_core.checkpoint.write.commit import clear_other_attempts, commit, prepare_step, withdraw
from nxdt_core.checkpoint.write.plan import SavePlan, agree_on_plan
from nxdt_core.checkpoint.write.rank_data import Share, prepare_share, write_share
from nxdt_core.errors.checkpoints import CheckpointFilesMissing, SaveLacksElements
from nxdt_core.protocols.parallel.piece import Listing, Piece, Place
from nxdt_core.protocols.parallel.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore

__all__ = ["save_checkpoint", "save_listed", "save_planned"]

Write = Callable[[AttemptWriter, AbstractSet[Place]], Mapping[Place, TensorPart]]
"""Writes the tensors that were assigned to this rank; returns the location of each."""


def save_checkpoint(
    storage: CheckpointStore,
    *,
    step: int,
    model: Mapping[str, torch.Tensor | Piece],
    optimizer: Mapping[str, torch.Tensor | Piece],
    state: Mapping[str, Any],
    facts: CheckpointFacts,
    ranks: RankAgreement | None = None,
    before_commit: Callable[[], None] | None = None,
    signer: Signer | None = None,
    ties: Mapping[str, str] | None = None,
) -> Manifest:
    """Save everything under ``step`` and commit it. A step that is committed already is replaced.

    Collective: it succeeds on all ranks or fails on all. Ranks may hold different tensors (stages of a pipeline) and
    different parts of one (DTensors); what several hold identically is written by one of them.

    Args:
        storage: where to; every rank reaches the same store.
        step: the number of optimizer steps done.
        model: parameters and buffers by their global names.
        optimizer: ``<parameter name>/<state name>`` → tensor.
        state: of this rank: JSON-able tree with plain tensors as leaves: positions, random states, schedules.
        facts: further entries of the manifest; those of rank 0 count.
        ranks: of the run; None for a process that is alone.
        before_commit: called on rank 0 once every file is durable, directly before the manifest is written. What it
            raises fails the save on all ranks, and nothing is committed.
        signer: signs the manifest, on rank 0; given on all ranks or on none. None leaves the checkpoint unsigned.
        ties: of the model's plan, name of the user → name of the owner; where ``model`` holds both, the user is not
            stored. None compares addresses, which lazy devices do not have. A training session passes ``{}``,
            since the ``state_dict`` of a parallel model has a tied parameter once.

    Raises:
        UnsavableState: a value is neither JSON-able nor a tensor with plain bytes; nothing was written.
        StorageFull, StorageDenied, StorageError: the store failed; committed checkpoints are as they were, and what
            this save wrote is deleted as far as the store lets it.
        CheckpointConflict: another run committed the same step meanwhile.
        CheckpointFilesMissing: rank 0 does not see what was written, whole.
        SaveLacksElements: the tensors are not as many elements as ``facts`` counts.
    """
    rank = rank_of(ranks)
    prepared: list[Share] = []

    def prepare() -> Listing:
        prepared.append(prepare_share(model, optimizer, state, rank=rank, ties=ties))
        return prepared[0].listing

    return save_listed(
        storage,
        step=step,
        prepare=prepare,
        write=lambda writer, mine: write_share(writer, prepared[0], mine, rank=rank),
        facts=facts,
        ranks=ranks,
        before_commit=before_commit,
        signer=signer,
    )


def save_listed(
    storage: CheckpointStore,
    *,
    step: int,
    prepare: Callable[[], Listing],
    write: Write,
    facts: CheckpointFacts,
    ranks: RankAgreement | None = None,
    before_commit: Callable[[], None] | None = None,
    signer: Signer | None = None,
) -> Manifest:
    """Save tensors as :func:`save_checkpoint` does; they need not be in memory all at once. Collective.

    Args:
        storage: where to; every rank reaches the same store.
        step: the number of optimizer steps done.
        prepare: checks everything before anything is written, and returns what this rank can write.
        write: writes, of that, the tensors that were given to this rank; returns where each is.
        facts: further entries of the manifest; those of rank 0 count.
        ranks: of the run; None for a process that is alone.
        before_commit: as of :func:`save_checkpoint`.
        signer: as of :func:`save_checkpoint`.
    """

    def check_and_list() -> Listing:
        encode_facts(facts)
        return prepare()

    plan = agree_on_plan(ranks, check_and_list, where=f"{storage.uri}/{step_name(step)}")
    check = None if before_commit is None else lambda manifest: before_commit()
    return save_planned(
        storage, step=step, plan=plan, write=write, facts=facts, ranks=ranks, before_commit=check, signer=signer
    )


def save_planned(
    storage: CheckpointStore,
    *,
    step: int,
    plan: SavePlan,
    write: Write,
    facts: CheckpointFacts,
    ranks: RankAgreement | None = None,
    add_files: Callable[[Manifest], Mapping[str, FileEntry]] | None = None,
    before_commit: Callable[[Manifest], None] | None = None,
    check_in_time: Callable[[], None] = lambda: None,
    signer: Signer | None = None,
) -> Manifest:
    """Save tensors as :func:`save_listed` does, once the ranks know who writes what. Collective.

    Args:
        storage: where to; every rank reaches the same store.
        step: the number of optimizer steps done.
        plan: of this save; equal on all ranks but for what is theirs.
        write: as of :func:`save_listed`.
        facts: further entries of the manifest; those of rank 0 count.
        ranks: of the run; None for a process that is alone.
        add_files: called on every rank once the files of all are durable, with the manifest so far; writes further
            ones below its prefix and returns their entries.
        before_commit: as of :func:`save_checkpoint`, called with the manifest that is about to be written.
        check_in_time: raises once this save was given up, and another one of the step may be under way.
        signer: as of :func:`save_checkpoint`.
    """
    digests = FAST if signer is None else signer.digests
    where, rank = f"{storage.uri}/{step_name(step)}", rank_of(ranks)
    replaces: list[bytes | None] = []

    def begin() -> tuple[str, str]:
        if rank == 0:
            with explained_os_errors(where):
                replaces.append(prepare_step(storage, step))
        return new_attempt(), datetime.now(UTC).isoformat(timespec="seconds")

    attempt, created = on_all_ranks(ranks, begin, where=where)[0]

    def write_share() -> _Written:
        with explained_os_errors(where):
            writer = AttemptWriter(storage, attempt_prefix(step, attempt), digests)
            return _Written(parts=write(writer, plan.mine), files=writer.entries)

    try:
        written = on_all_ranks(ranks, write_share, where=where)
        manifest = Manifest(
            step=step,
            attempt=attempt,
            created=created,
            facts=facts,
            files={name: entry for each in written for name, entry in each.files.items()},
            tensors=merge(plan.listings, [each.parts for each in written], SECTIONS),
            digests=digests,
        )
        if add_files is not None:
            manifest = _with_files(manifest, on_all_ranks(ranks, lambda: add_files(manifest), where=where))
        on_first_rank(
            ranks, lambda: _commit(storage, manifest, replaces[0], before_commit, check_in_time, signer), where=where
        )
    except BaseException:
        if rank == 0:
            withdraw(storage, step, attempt)
        raise
    on_first_rank(ranks, lambda: _finish(storage, manifest, check_in_time), where=where)
    return manifest


@dataclass(frozen=True, slots=True)
class _Written:
    """What one rank wrote."""

    files: Mapping[str, FileEntry]
    parts: Mapping[Place, TensorPart]


def _with_files(manifest: Manifest, added: Sequence[Mapping[str, FileEntry]]) -> Manifest:
    files = {name: entry for each in added for name, entry in each.items()}
    return replace(manifest, files={**manifest.files, **files})


def _commit(
    storage: CheckpointStore,
    manifest: Manifest,
    replaces: bytes | None,
    before_commit: Callable[[Manifest], None] | None,
    check_in_time: Callable[[], None],
    signer: Signer | None,
) -> None:
    with explained_os_errors(f"{storage.uri}/{step_name(manifest.step)}"):
        _check_elements(storage, manifest)
        _check_visible(storage, manifest)
        if before_commit is not None:
            before_commit(manifest)
        check_in_time()
        commit(storage, manifest, replaces, signer=signer)


def _check_elements(storage: CheckpointStore, manifest: Manifest) -> None:
    """A reader would call it damaged."""
    stored, counted = manifest.stored_elements, manifest.facts.elements
    if counted and stored != counted:
        reason = f"it would store {stored} elements of a model that has {counted}"
        raise SaveLacksElements(where=f"{storage.uri}/{step_name(manifest.step)}", reason=reason)


def _check_visible(storage: CheckpointStore, manifest: Manifest) -> None:
    """Check that the store has truncated no file, and that no other rank wrote to its own machine's disk."""
    wanted = {name: entry.size_bytes for name, entry in manifest.files.items()}
    wanted |= {digests_name(name): entry.digests_bytes for name, entry in manifest.files.items()}
    found = {info.key: info.size_bytes for info in storage.list(manifest.prefix)}
    missing = [name for name, size in wanted.items() if found.get(manifest.prefix + name) != size]
    if missing:
        reason = f"rank 0 does not see {len(missing)} of {len(wanted)} files as they were written, first {missing[0]}"
        raise CheckpointFilesMissing(where=f"{storage.uri}/{manifest.prefix}", reason=reason)


def _finish(storage: CheckpointStore, manifest: Manifest, check_in_time: Callable[[], None]) -> None:
    clear_other_attempts(storage, manifest, check_in_time)
    with explained_os_errors(f"{storage.uri}/{step_name(manifest.step)}"):
        storage.after_commit(step_prefix(manifest.step))
