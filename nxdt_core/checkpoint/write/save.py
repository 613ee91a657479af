"""Saving one checkpoint: data files first, each with its digests, the manifest last.

Until the manifest exists nothing is visible; once it exists everything under it is complete and durable. A save
that fails leaves what was committed before and takes its own files away. Ranks write at the same time, each its share
of what it holds; the first commits once all are done, or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from nxdt_core.checkpoint.collective import on_all_ranks, on_first_rank, rank_of
from nxdt_core.checkpoint.commit import clear_other_attempts, commit, prepare_step, withdraw
from nxdt_core.checkpoint.format.digested_files import AttemptWriter
from nxdt_core.checkpoint.format.digests import FAST, Algorithm
from nxdt_core.checkpoint.format.file_names import (
    SECTIONS,
    attempt_prefix,
    digests_name,
    new_attempt,
    step_name,
    step_prefix,
)
from nxdt_core.checkpoint.format.manifest import FileEntry, Manifest
from nxdt_core.checkpoint.format.tensor_index import TensorPart
from nxdt_core.checkpoint.signing import Signer
from nxdt_core.checkpoint.storage import explained_os_errors
from nxdt_core.checkpoint.write.plan import SavePlan, merge
from nxdt_core.errors.checkpoints import CheckpointFilesMissing, SaveLacksElements
from nxdt_core.protocols.piece import TensorKey
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore

__all__ = ["save"]


def save(
    storage: CheckpointStore,
    plan: SavePlan,
    *,
    ranks: RankAgreement | None = None,
    add_files: Callable[[Manifest], Mapping[str, FileEntry]] | None = None,
    before_commit: Callable[[Manifest], object] | None = None,
    check_in_time: Callable[[], None] = lambda: None,
    signer: Signer | None = None,
) -> Manifest:
    """Save what is planned and commit it. A step that is committed already is replaced.

    Collective: it succeeds on all ranks or fails on all.

    Args:
        storage: the store to write to, the same for every rank.
        plan: what :func:`nxdt_core.checkpoint.plan_save` returned.
        ranks: of the run; None for a process that is alone.
        add_files: called on every rank once the files of all are durable, with the manifest so far; writes further
            ones below its prefix and returns their entries.
        before_commit: called on rank 0 once every file is durable, with the manifest that is about to be written. What
            it raises fails the save on all ranks, and nothing is committed.
        check_in_time: raises once this save was given up, and another one of the step may be under way.
        signer: signs the manifest, on rank 0; given on all ranks or on none. None leaves the checkpoint unsigned.

    Raises:
        StorageFull, StorageDenied, StorageError: the store failed; committed checkpoints are as they were, and what
            this save wrote is deleted as far as the store lets it.
        CheckpointConflict: another run committed the same step meanwhile.
        CheckpointFilesMissing: rank 0 does not see what was written, whole.
        SaveLacksElements: the tensors are not as many elements as the plan's facts count.
    """
    step, rank = plan.step, rank_of(ranks)
    where = f"{storage.uri}/{step_name(step)}"
    replaces: list[bytes | None] = []

    def begin() -> tuple[str, str]:
        if rank == 0:
            with explained_os_errors(where):
                replaces.append(prepare_step(storage, step))
        return new_attempt(), datetime.now(UTC).isoformat(timespec="seconds")

    attempt, created = on_all_ranks(ranks, begin, where=where)[0]
    try:
        manifest = _write(storage, plan, attempt, created, ranks, FAST if signer is None else signer.digests)
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


def _write(
    storage: CheckpointStore,
    plan: SavePlan,
    attempt: str,
    created: str,
    ranks: RankAgreement | None,
    digests: Algorithm,
) -> Manifest:
    """Write the share of each rank, and return the manifest of what all of them wrote. Collective."""
    where = f"{storage.uri}/{step_name(plan.step)}"

    def write_share() -> _Written:
        with explained_os_errors(where):
            writer = AttemptWriter(storage, attempt_prefix(plan.step, attempt), digests)
            return _Written(parts=plan.write(writer, plan.assignment.mine), files=writer.entries)

    written = on_all_ranks(ranks, write_share, where=where)
    return Manifest(
        step=plan.step,
        attempt=attempt,
        created=created,
        facts=plan.facts,
        files={name: entry for share in written for name, entry in share.files.items()},
        tensors=merge(plan.assignment.listings, [share.parts for share in written], SECTIONS),
        digests=digests,
    )


@dataclass(frozen=True, slots=True)
class _Written:
    """Files and parts of tensors that one rank wrote."""

    files: Mapping[str, FileEntry]
    parts: Mapping[TensorKey, TensorPart]


def _with_files(manifest: Manifest, added: Sequence[Mapping[str, FileEntry]]) -> Manifest:
    files = {name: entry for table in added for name, entry in table.items()}
    return replace(manifest, files={**manifest.files, **files})


def _commit(
    storage: CheckpointStore,
    manifest: Manifest,
    replaces: bytes | None,
    before_commit: Callable[[Manifest], object] | None,
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
    sizes = {info.key: info.size_bytes for info in storage.list(manifest.prefix)}
    missing = [name for name, size in wanted.items() if sizes.get(manifest.prefix + name) != size]
    if missing:
        reason = f"rank 0 does not see {len(missing)} of {len(wanted)} files as they were written, first {missing[0]}"
        raise CheckpointFilesMissing(where=f"{storage.uri}/{manifest.prefix}", reason=reason)


def _finish(storage: CheckpointStore, manifest: Manifest, check_in_time: Callable[[], None]) -> None:
    clear_other_attempts(storage, manifest, check_in_time)
    with explained_os_errors(f"{storage.uri}/{step_name(manifest.step)}"):
        storage.after_commit(step_prefix(manifest.step))
