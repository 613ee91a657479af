"""Checkpoint after checkpoint of one run: in the background, one at a time, every decision taken by all ranks together.

Training waits until the tensors are copied to the host; a thread writes the copies and commits them. Ranks see the end
of a save at different moments, so they act on it at one step boundary, once all of them have seen it.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

from nxdt_core.checkpoint.collective import on_all_ranks, rank_of
from nxdt_core.checkpoint.commit import check_weights_moved
from nxdt_core.checkpoint.format.file_names import step_name
from nxdt_core.checkpoint.format.manifest import CheckpointFacts, FileEntry, Manifest
from nxdt_core.checkpoint.signing import Signer
from nxdt_core.checkpoint.write.save import Planner, SavePlan, plan_save, save
from nxdt_core.distributed.buckets import buckets
from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.errors import NxdtError
from nxdt_core.errors.checkpoints import SaveTookTooLong, StorageError
from nxdt_core.protocols.ranks import RankAgreement
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.protocols.tensor_shards import LocalShard

_NICENESS = 15
"""Niceness of the thread and of those that it starts: on a host that computes, a save uses the cores that training
leaves free. On two cores the next ten steps take 1.2 times as long as those before, and 1.4 times without it."""


_Key = TypeVar("_Key")
_SLAB_BYTES = 256 * 2**20
"""Memory is taken in slabs of this size (a larger tensor apart): torch rounds pinned memory up to a power of two."""
_ALIGNMENT = 64
_log = logging.getLogger(__name__)
_TOPIC = "checkpoint"
_SEEN = {"done": 1, "running": 2, "failed": 3}
"""States of the save in flight that a rank can see; the ranks act on the greatest. (0 is the answer to no question.)"""


@dataclass(eq=False, kw_only=True)
class _PendingSave:
    """A save that runs in parallel with the caller.

    Its thread does not keep the process alive: a store that hangs cannot be interrupted, only left behind.
    """

    plan: SavePlan
    where: str
    """Address of the step, for messages."""
    captured_at: float
    """Time of the state that it holds, in seconds since the epoch."""
    begun: float
    """``time.monotonic()`` of the call that began it."""
    deadline_s: float
    """How long it may take."""
    yields: bool
    """Give other threads of this process the cores first, for a caller that computes meanwhile."""
    blocked_s: float = 0.0
    durable_at: float = 0.0
    result: Future[Manifest] = field(default_factory=Future)

    def start(self, work: Callable[[_PendingSave], Manifest]) -> None:
        """Begin ``work``, which commits the plan of this save."""
        self._ends_at = time.monotonic() + self.deadline_s
        threading.Thread(target=self._run, args=(work,), name=f"save {self.where}", daemon=True).start()

    @property
    def state(self) -> Literal["running", "done", "failed"]:
        """Return its state; one that runs beyond its deadline has failed."""
        if self.result.done():
            return "done" if self.result.exception() is None else "failed"
        return "running" if time.monotonic() < self._ends_at else "failed"

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, at most until its deadline."""
        left_s = max(0.0, self._ends_at - time.monotonic())
        wait([self.result], left_s if timeout_s is None else min(timeout_s, left_s))

    def give_up(self) -> None:
        """Mark it as late, regardless of the time left: another rank's time is over."""
        self._ends_at = min(self._ends_at, time.monotonic())

    def check_deadline(self, cause: BaseException | None = None) -> None:
        """Raise beyond the deadline; ``cause``: what a wait for another rank ended in by then.

        Raises:
            SaveTookTooLong: the deadline is over.
        """
        if time.monotonic() > self._ends_at:
            reason = f"it takes more than {self.deadline_s:g} s"
            raise SaveTookTooLong(where=self.where, reason=reason) from cause

    def raise_failure(self) -> None:
        """Raise why it failed; nothing where it runs or is done. Does not wait.

        Raises:
            SaveTookTooLong: it runs beyond its deadline.
        """
        if self.result.done():
            self.result.result()
        else:
            self.check_deadline()

    def _run(self, work: Callable[[_PendingSave], Manifest]) -> None:
        if self.yields and sys.platform == "linux":  # which alone has priorities of threads
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            try:
                manifest = work(self)
            except NxdtError:
                raise
            except BaseException as error:
                self.check_deadline(error)
                raise
        except BaseException as error:  # raised by raise_failure
            self.result.set_exception(error)
        else:
            self.result.set_result(manifest)


class StagingBuffers:
    """Memory on the host that shards are copied to. One copy of everything that is staged, and no more."""

    def __init__(self) -> None:
        self._buffers: dict[object, torch.Tensor] = {}

    @torch.no_grad()
    def stage(self, shards: Mapping[_Key, LocalShard]) -> dict[_Key, LocalShard]:
        """Return the shards with their present elements, copied to the host; returns when the copies are made.

        What the last call returned is overwritten. Memory is allocated again only where keys, shapes or dtypes differ
        from those of the last call.
        """
        tensors = {key: shard.tensor for key, shard in shards.items()}
        kinds = {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
        if {key: (buffer.shape, buffer.dtype) for key, buffer in self._buffers.items()} != kinds:
            self._buffers = {}  # freed before more is taken
            pinned = any(profile_of(tensor.device).pinned_host_memory for tensor in tensors.values())
            sizes = {key: math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT for key, tensor in tensors.items()}
            for keys in buckets(sizes, sizes.__getitem__, _SLAB_BYTES):
                size, start = sum(sizes[key] for key in keys), 0
                if pinned or not size or not hasattr(mmap, "MADV_HUGEPAGE"):
                    slab = torch.empty(size, dtype=torch.uint8, device=HOST, pin_memory=pinned)
                else:  # in huge pages where the system has them: the first copy is then four times as fast
                    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                    with suppress(OSError):  # a kernel without them
                        memory.madvise(mmap.MADV_HUGEPAGE)
                    slab = torch.frombuffer(memory, dtype=torch.uint8)
                for key in keys:
                    like = tensors[key]
                    self._buffers[key] = slab[start : start + like.nbytes].view(like.dtype).view(like.shape)
                    start += sizes[key]
        for key, shard in shards.items():
            if profile_of(shard.tensor.device).lazy:
                self._buffers[key].copy_(shard.tensor.to(HOST))  # functional tensors cannot be copied in place
            else:
                self._buffers[key].copy_(shard.tensor, non_blocking=True)
        for device in {shard.tensor.device for shard in shards.values()}:
            if not profile_of(device).lazy:
                profile_of(device).operations.synchronize(device)
        return {key: LocalShard(self._buffers[key], shard.shape, shard.region) for key, shard in shards.items()}


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
        model: Mapping[str, torch.Tensor | LocalShard],
        optimizer: Mapping[str, torch.Tensor | LocalShard],
        state: Mapping[str, Any],
        facts: CheckpointFacts,
        ties: Mapping[str, str] | None = None,
        asynchronous: bool = True,
    ) -> bool:
        """Save everything as it is now; the tensors may be changed as soon as it returns.

        Args:
            step, model, optimizer, state, facts, ties: as in :func:`nxdt_core.checkpoint.plan_save`.
            asynchronous: write copies in the background; False takes none, and commits before it returns.

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
        plan = plan_save(
            self.storage,
            step=step,
            model=model,
            optimizer=optimizer,
            state=state,
            facts=facts,
            ranks=self._ranks,
            ties=ties,
            planner=self._planner,
            stage=self._staging.stage if asynchronous else None,
        )
        ranks = self._background
        flight = _PendingSave(
            plan=plan,
            where=f"{self.storage.uri}/{step_name(step)}",
            captured_at=captured_at,
            begun=begun,
            deadline_s=self._deadline_s,
            yields=asynchronous,
        )
        flight.start(lambda flight: self._write(flight, ranks))
        self._flight = flight
        flight.blocked_s = time.monotonic() - begun
        if not asynchronous:
            self.wait()
        return True

    def poll(self) -> None:
        """Check, at a step boundary, whether the save in flight has ended. Never waits for it.

        Raises:
            NxdtError: on all ranks at the same step, what it met; committed checkpoints are as they were.
        """
        if self._flight is None:
            return
        seen = _SEEN[self._flight.state]
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
        self._flight.wait()
        self._end(self._flight, begun)

    def wait_locally(self, timeout_s: float) -> None:
        """Give the save in flight some seconds to end, without asking the other ranks: for a run that breaks."""
        if self._flight is not None:
            self._flight.wait(timeout_s)

    def _end(self, flight: _PendingSave, begun: float) -> None:
        """Take the result of a save that has ended, or that all ranks know to have failed on some rank.

        ``begun``: when the loop began to wait for it.
        """
        self._flight = None
        if self._ranks is not None:
            self._ranks.last_answer(topic=_TOPIC)
        try:
            on_all_ranks(self._ranks, flight.raise_failure, where=flight.where)
        except BaseException:  # on all ranks: reconnecting is collective
            flight.give_up()
            self._background, self._staging = None, StagingBuffers()  # a thread that hangs keeps the old ones
            raise
        flight.blocked_s += time.monotonic() - begun
        self._newest = manifest = flight.result.result(0)
        if self._on_saved is not None:
            self._on_saved(
                SaveReport(
                    manifest=manifest,
                    blocked_s=flight.blocked_s,
                    seconds=flight.durable_at - flight.begun,
                    captured_at=flight.captured_at,
                )
            )

    def _write(self, flight: _PendingSave, ranks: RankAgreement | None) -> Manifest:
        """Run the save itself: in the background over copies, else over the tensors."""

        def check(manifest: Manifest) -> None:
            if self._refuses:
                check_weights_moved(self._newest, manifest, uri=self.storage.uri)
            if self._before_commit is not None:
                self._before_commit()

        manifest = save(
            self.storage,
            flight.plan,
            ranks=ranks,
            add_files=self._add_files,
            before_commit=check,
            check_in_time=flight.check_deadline,
            signer=self._signer,
        )
        flight.durable_at = time.monotonic()
        if self._rank == 0 and self._after_commit is not None:
            try:
                self._after_commit(manifest)
            except (OSError, StorageError) as error:
                _log.warning("after the commit of %s: %s", flight.where, error)
        return manifest

    def _connect(self) -> None:
        """Connect the thread to the other ranks over a separate group. Collective."""
        if self._ranks is not None and self._background is None:
            self._background = self._ranks.sibling(timeout_s=self._deadline_s)
