"""Checkpoint after checkpoint of one run: in the background, one at a time, every decision taken by all ranks together.

Training waits until the tensors are copied to the host; a thread writes the copies and commits them. Ranks see the end
of a save at different moments, so they act on it at one step boundary, once all of them have seen it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from nxdt_core.checkpoint.collective import on_all_ranks, rank_of
from nxdt_core.checkpoint.commit import check_weights_moved
from nxdt_core.checkpoint.format.digested_files import AttemptWriter
from nxdt_core.checkpoint.format.file_names import step_name
from nxdt_core.checkpoint.format.manifest import CheckpointFacts, FileEntry, Manifest, encode_facts
from nxdt_core.checkpoint.format.tensor_index import TensorPart
from nxdt_core.checkpoint.signing import Signer
from nxdt_core.checkpoint.write.background import BackgroundJob, StagingBuffers
from nxdt_core.checkpoint.write.plan import (
    Assignment,
    LocalPlan,
    Planner,
    SavePlan,
    prepare_local_plan,
    write_local_plan,
)
from nxdt_core.checkpoint.write.save import save
from nxdt_core.errors.checkpoints import StorageError
from nxdt_core.protocols.piece import Listing, Piece, TensorKey
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore

_log = logging.getLogger(__name__)

_TOPIC = "checkpoint"
_SEEN = {"done": 1, "running": 2, "failed": 3}
"""States of the save in flight that a rank can see; the ranks act on the greatest. (0 is the answer to no question.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """Duration and size of one committed checkpoint."""

    manifest: Manifest
    blocked_s: float
    """Seconds that training waited for it on this rank: for an earlier save, for the other ranks, for the copy to the
    host, and for its end where something waited for that."""
    seconds: float
    """Seconds from the call that began it until it was durable on all ranks."""
    captured_at: float
    """Time at which the run was as it holds it, in seconds since the epoch."""

    @property
    def gigabytes_per_s(self) -> float:
        """Bytes of the whole checkpoint by the time that it took, in 10⁹ bytes per second."""
        return self.manifest.size_bytes / max(self.seconds, 1e-9) / 1e9

    def __str__(self) -> str:
        size = self.manifest.size_bytes
        speed = f"{_format_size(size / max(self.seconds, 1e-9))}/s"
        return f"{_format_size(size)} in {self.seconds:.1f} s, {speed}, training waited {self.blocked_s:.2f} s"


def _format_size(size_bytes: float) -> str:
    gib, mib = size_bytes / 2**30, size_bytes / 2**20
    return f"{gib:.3g} GiB" if gib >= 1 else f"{mib:.3g} MiB"


class CheckpointManager:
    """Saves the checkpoints of a run. Collective: all ranks make one and call its methods at the same steps.

    Example::

        manager = CheckpointManager(storage, ranks=engine.ranks)
        for step, batch in enumerate(batches, start=1):
            train(batch)
            manager.poll()                                       # raises here what a save met
            if step % 100 == 0:
                manager.save(step=step, model=…, optimizer=…, state=…, facts=…)
        manager.wait()

    Args:
        storage: the store to write to, the same for every rank.
        ranks: of the run; None for a process that is alone.
        asynchronous: False takes no copy, and commits before :meth:`save` returns.
        when_busy: what a save does while one is in flight: ``wait`` for that, or ``skip``.
        deadline_s: how long one save may take, in the background and in all.
        newest: the committed checkpoint that the run resumes from.
        refuse_same_weights: do not commit the same weights under two steps between which updates were applied.
        add_files: called on every rank before each commit, with the manifest so far; writes further files below its
            prefix and returns their entries.
        before_commit: called on rank 0 directly before each commit; what it raises fails the save.
        after_commit: called on rank 0 after each commit, in the background.
        on_saved: called on every rank, at one step, once a checkpoint is committed.
        signer: signs each manifest, on rank 0; given on all ranks or on none.
    """

    def __init__(
        self,
        storage: CheckpointStore,
        *,
        ranks: RankAgreement | None = None,
        asynchronous: bool = True,
        when_busy: Literal["wait", "skip"] = "wait",
        deadline_s: float = 1800.0,
        newest: Manifest | None = None,
        refuse_same_weights: bool = True,
        add_files: Callable[[Manifest], Mapping[str, FileEntry]] | None = None,
        before_commit: Callable[[], None] | None = None,
        after_commit: Callable[[Manifest], object] | None = None,
        on_saved: Callable[[SaveReport], None] | None = None,
        signer: Signer | None = None,
    ) -> None:
        self.storage = storage
        self._ranks = ranks
        self._rank = rank_of(ranks)
        self._asynchronous = asynchronous
        self._skips = when_busy == "skip"
        self._deadline_s = deadline_s
        self._newest = newest
        self._refuses = refuse_same_weights
        self._add_files = add_files
        self._before_commit = before_commit
        self._after_commit = after_commit
        self._on_saved = on_saved
        self._signer = signer
        self._planner = Planner(ranks)
        self._staging = StagingBuffers()
        self._background: RankAgreement | None = None
        self._flight: _PendingSave | None = None
        self._connect()

    @property
    def busy(self) -> bool:
        """Return whether a save is in flight, as far as all ranks know: the same on each of them."""
        return self._flight is not None

    def save(
        self,
        *,
        step: int,
        model: Mapping[str, torch.Tensor | Piece],
        optimizer: Mapping[str, torch.Tensor | Piece],
        state: Mapping[str, Any],
        facts: CheckpointFacts,
        ties: Mapping[str, str] | None = None,
    ) -> bool:
        """Begin a save of everything as it is now; arguments are those of
        :func:`nxdt_core.checkpoint.plan_save`.

        The tensors may be changed as soon as it returns.

        Returns:
            False where it was skipped, since another one is in flight.

        Raises:
            NxdtError: on all ranks, what the save before met, or this one so far.
        """
        if self._skips and self.busy:
            return False
        self.wait()
        begun, captured_at = time.monotonic(), time.time()
        self._connect()
        shares: list[LocalPlan] = []

        def prepare() -> Listing:
            encode_facts(facts)
            shares.append(prepare_local_plan(model, optimizer, state, rank=self._rank, ties=ties))
            return shares[0].listing

        assignment = self._planner.plan(prepare, where=self._where(step))
        flight = _PendingSave(
            step=step,
            share=shares[0],
            assignment=assignment,
            facts=facts,
            begun=begun,
            captured_at=captured_at,
        )
        if self._asynchronous:
            self._stage(flight)
        ranks = self._background
        flight.job = BackgroundJob(
            lambda job: self._write(flight, ranks, job),
            where=self._where(step),
            deadline_s=self._deadline_s,
            yields=self._asynchronous,
        )
        self._flight = flight
        flight.blocked_s = time.monotonic() - begun
        if not self._asynchronous:
            self.wait()
        return True

    def poll(self) -> None:
        """Check, at a step boundary, whether the save in flight has ended. Never waits for it.

        Raises:
            NxdtError: on all ranks at the same step, what it met; committed checkpoints are as they were.
        """
        if self._flight is None:
            return
        seen = _SEEN[self._flight.running.state]
        agreed = seen if self._ranks is None else self._ranks.largest_before(seen, topic=_TOPIC)
        if agreed in (_SEEN["done"], _SEEN["failed"]):
            self._end(self._flight, time.monotonic())

    def wait(self) -> None:
        """Wait for the save in flight, if there is one.

        Raises:
            NxdtError: on all ranks, what it met.
        """
        if self._flight is None:
            return
        begun = time.monotonic()
        self._flight.running.wait()
        self._end(self._flight, begun)

    def wait_locally(self, timeout_s: float) -> None:
        """Give the save in flight some seconds to end, without asking the other ranks: for a run that breaks."""
        if self._flight is not None:
            self._flight.running.wait(timeout_s)

    def _end(self, flight: _PendingSave, begun: float) -> None:
        """Take the result of a save that has ended, or that all ranks know to have failed on some rank.

        ``begun``: when the loop began to wait for it.
        """
        self._flight = None
        if self._ranks is not None:
            self._ranks.last_answer(topic=_TOPIC)
        try:
            on_all_ranks(self._ranks, flight.running.raise_failure, where=self._where(flight.step))
        except BaseException:  # on all ranks: reconnecting is collective
            flight.running.give_up()
            self._background, self._staging = None, StagingBuffers()  # a thread that hangs keeps the old ones
            raise
        flight.blocked_s += time.monotonic() - begun
        self._report(flight, flight.running.result())

    def _report(self, flight: _PendingSave, manifest: Manifest) -> None:
        self._newest = manifest
        if self._on_saved is not None:
            self._on_saved(
                SaveReport(
                    manifest=manifest,
                    blocked_s=flight.blocked_s,
                    seconds=flight.durable_at - flight.begun,
                    captured_at=flight.captured_at,
                )
            )

    def _stage(self, flight: _PendingSave) -> None:
        """Replace the pieces that this rank writes with copies, and drop the others."""
        mine = {place: piece for place, piece in flight.share.pieces.items() if place in flight.assignment.mine}
        try:
            flight.share = replace(flight.share, pieces=self._staging.stage(mine))
        except Exception as error:  # the save itself reports it to all ranks
            flight.unstaged = error

    def _write(self, flight: _PendingSave, ranks: RankAgreement | None, job: BackgroundJob[Manifest]) -> Manifest:
        """Run the save itself: in the background over copies, else over the tensors."""

        def write(writer: AttemptWriter, mine: AbstractSet[TensorKey]) -> Mapping[TensorKey, TensorPart]:
            if flight.unstaged is not None:
                raise flight.unstaged
            return write_local_plan(writer, flight.share, mine, rank=self._rank)

        def check(manifest: Manifest) -> None:
            if self._refuses:
                check_weights_moved(self._newest, manifest, uri=self.storage.uri)
            if self._before_commit is not None:
                self._before_commit()

        manifest = save(
            self.storage,
            SavePlan(step=flight.step, facts=flight.facts, assignment=flight.assignment, write=write),
            ranks=ranks,
            add_files=self._add_files,
            before_commit=check,
            check_in_time=job.check_deadline,
            signer=self._signer,
        )
        flight.durable_at = time.monotonic()
        if self._rank == 0 and self._after_commit is not None:
            try:
                self._after_commit(manifest)
            except (OSError, StorageError) as error:
                _log.warning("after the commit of %s: %s", self._where(flight.step), error)
        return manifest

    def _connect(self) -> None:
        """Connect the thread to the other ranks over a separate group. Collective."""
        if self._ranks is not None and self._background is None:
            self._background = self._ranks.sibling(timeout_s=self._deadline_s)

    def _where(self, step: int) -> str:
        return f"{self.storage.uri}/{step_name(step)}"


@dataclass(slots=True, kw_only=True)
class _PendingSave:
    """A save under way."""

    step: int
    share: LocalPlan
    assignment: Assignment
    facts: CheckpointFacts
    begun: float
    captured_at: float
    blocked_s: float = 0.0
    durable_at: float = 0.0
    unstaged: Exception | None = None
    """Error that kept this rank from copying its share."""
    job: BackgroundJob[Manifest] | None = None

    @property
    def running(self) -> BackgroundJob[Manifest]:
        assert self.job is not None, "only saves in the background are in flight"
        return self.job
