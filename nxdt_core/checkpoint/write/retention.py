"""The choice of checkpoints to delete, for a command and after each commit of a run. Torch-free.

Only one run saves to a store, so what is there is looked up once. Later saves read nothing of older checkpoints.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, final

from nxdt_core.checkpoint.format.file_names import manifest_key, step_name, step_prefix
from nxdt_core.checkpoint.format.manifest import CheckpointFacts, Manifest
from nxdt_core.checkpoint.read.status import CheckpointStatus, list_checkpoints, newest_first, verify
from nxdt_core.checkpoint.storage import explained_os_errors
from nxdt_core.config.schema import mode_of
from nxdt_core.errors.checkpoints import NoBestCheckpoint
from nxdt_core.protocols.store import CheckpointStore

_STEP = re.compile(r"step-0*([0-9]{1,15})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Rule for the committed checkpoints that stay: the newest, those saved as permanent, and those that one of the two
    counts keeps.

    Ephemeral ones stay only as the newest, and count for neither.
    """

    keep_last: int = 0
    """Number of the newest ones that stay."""
    save_top_k: int = 0
    """Number of the best ones by :attr:`monitor` that stay; -1 keeps all."""
    monitor: str = "step"
    """Metric of the manifest that ranks them, or ``step``. Those without it, or with NaN, rank last."""
    mode: Literal["min", "max"] = "max"
    """``min``: a smaller metric is better; ``max``: a larger one. Of equal ones the newer is better."""

    def __post_init__(self) -> None:
        if self.keep_last < 0 or self.save_top_k < -1:
            raise ValueError(f"keep_last is {self.keep_last}, save_top_k is {self.save_top_k}")

    def kept(self, committed: Sequence[CheckpointStatus]) -> set[int]:
        """Return the steps of those that stay; ``committed`` ascends."""
        return self.counted(committed) | {status.step for status in committed if _kind(status) == "permanent"}

    def counted(self, committed: Sequence[CheckpointStatus]) -> set[int]:
        """Return the steps of those that stay as the newest, or by one of the two counts; ``committed`` ascends."""
        regular = [status for status in committed if _kind(status) != "ephemeral"]
        best = sorted(regular, key=self.score, reverse=True)
        chosen = list(committed[-1:])
        chosen += regular[-self.keep_last :] if self.keep_last else []
        chosen += best if self.save_top_k < 0 else best[: self.save_top_k]
        return {status.step for status in chosen}

    def score(self, status: CheckpointStatus) -> tuple[bool, float, int]:
        """Return what ranks a checkpoint, the best largest; its first element is false without the metric."""
        metrics = {} if status.facts is None else status.facts.metrics
        value = float(status.step) if self.monitor == "step" else metrics.get(self.monitor, math.nan)
        if math.isnan(value):
            return False, 0.0, status.step
        return True, value if self.mode == "max" else -value, status.step


def with_best(
    uri: str, locate: Callable[[str], tuple[CheckpointStore, int | None]]
) -> tuple[CheckpointStore, int | None]:
    """Return the store and the step of an address that a person gives, as ``locate`` finds them.

    The directory of a run stands for its ``checkpoints``, and the number of a step needs no leading zeros. ``best`` in
    the place of a step is the one that ``checkpoint.monitor`` of the newest ranks first; a store of that name comes
    first.

    Raises:
        NoBestCheckpoint: none can be ranked.
    """
    root, _, last = uri.rstrip("/").rpartition("/")
    number = _STEP.fullmatch(last)
    if number is not None:
        return locate(f"{_in_run(root or '.')}/{step_name(int(number[1]))}")
    storage, step = locate(_in_run(uri))
    if last != "best" or any(list_checkpoints(storage)):
        return storage, step
    storage, _ = locate(_in_run(root or "."))
    committed = [status for status in list_checkpoints(storage) if status.state == "committed"]
    if not committed or committed[-1].facts is None:
        return storage, None
    saved = committed[-1].facts.config.get("checkpoint", {})
    monitor, mode = str(saved.get("monitor", "step")), saved.get("mode")
    policy = Retention(monitor=monitor, mode=mode_of(monitor, mode if mode in ("min", "max") else None) or "max")
    best = max(committed, key=policy.score)
    if policy.monitor == "step" or not policy.score(best)[0]:
        raise NoBestCheckpoint(where=storage.uri, monitor=policy.monitor)
    return storage, best.step


def _in_run(uri: str) -> str:
    """Return the directory of checkpoints where ``uri`` names the directory of a run."""
    below = Path(uri, "checkpoints")
    return str(below) if below.is_dir() else uri


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """Steps that :func:`prune` would keep and delete, in ascending order."""

    keep: tuple[int, ...]
    """Committed steps that stay."""
    delete: tuple[int, ...]
    """Steps to delete, in any state; empty where none of those to keep is sound."""
    sound: bool
    """True if one of those to keep verifies."""


def plan_prune(
    storage: CheckpointStore,
    keep: int | Retention,
    *,
    deep: bool = True,
    passed_over: Callable[[int], bool] = lambda step: False,
    statuses: Sequence[CheckpointStatus] | None = None,
) -> PrunePlan:
    """Return what :func:`prune` would delete; nothing is deleted.

    Args:
        storage, keep, deep, passed_over: as in :func:`prune`.
        statuses: the steps of the store, ascending; None looks them up.
    """
    if isinstance(keep, int):
        if keep < 1:
            raise ValueError(f"keep_last is {keep}; the last checkpoint is never deleted")
        keep = Retention(keep_last=keep)
    statuses = list_checkpoints(storage) if statuses is None else statuses

    usable = [status for status in statuses if status.state == "committed" and not passed_over(status.step)]
    staying = keep.kept(usable)
    others = [status.step for status in usable if status.step not in staying]
    order = [*sorted(staying, reverse=True), *reversed(others)]
    sound = next((step for step in order if not verify(storage, step, deep=deep)), None)
    if sound is None:
        return PrunePlan(keep=tuple(sorted(order)), delete=(), sound=False)
    staying.update(order[: order.index(sound) + 1])

    def stays(status: CheckpointStatus) -> bool:
        """Return whether it is permanent and shows no damage: a fault of reading may have been taken for one."""
        return status.state == "committed" and _kind(status) == "permanent"

    unusable = [status for status in statuses if status not in usable and not status.is_link]
    broken = [status.step for status in unusable if status.step < sound and not stays(status)]
    return PrunePlan(keep=tuple(sorted(staying)), delete=tuple(sorted({*others, *broken} - staying)), sound=True)


def prune(
    storage: CheckpointStore,
    keep: int | Retention,
    *,
    deep: bool = True,
    passed_over: Callable[[int], bool] = lambda step: False,
) -> list[int]:
    """Delete committed checkpoints that need not be kept, and unfinished or damaged ones older than a sound one.

    Unfinished and damaged steps do not count towards ``keep``. Call this after a commit, never before. Nothing is
    deleted unless one of the kept checkpoints verifies; until one does, more are kept, the newest first.

    Args:
        storage: the store that holds the checkpoints.
        keep: which checkpoints stay; a number, at least 1, keeps that many of the newest.
        deep: verify by reading every byte of a kept checkpoint (usually only one). False compares names and sizes, for
            a caller that has just committed the newest checkpoint and does not want to read it again.
        passed_over: whether a step is known to be damaged although its names and sizes are right, such as one that a
            run passed over when it resumed. Such steps do not count, like visibly damaged ones, whether they are older
            or newer than the step that was just committed; permanent ones stay.

    Returns:
        The steps that were deleted, ascending.
    """
    plan = plan_prune(storage, keep, deep=deep, passed_over=passed_over)
    with explained_os_errors(storage.uri):
        for step in plan.delete:
            delete_step(storage, step)
    return list(plan.delete)


def delete_step(storage: CheckpointStore, step: int) -> None:
    """Delete one step, the manifest first: what is left of an interrupted deletion is unfinished, never damaged."""
    storage.delete_many([manifest_key(step)])
    storage.delete_many([info.key for info in storage.list(step_prefix(step))])


@final
class RunRetention:
    """Applies a policy to the checkpoints of one run, with the result of :func:`nxdt_core.checkpoint.prune`.

    The first commit reads each manifest once, and none where the policy keeps all. Later commits list the files of the
    checkpoints that the policy counts, and only if something is to be deleted: other programs may have deleted or
    damaged some.

    Args:
        storage: the store that the run owns.
        policy: which checkpoints stay.
        saves_ephemeral: whether the run saves checkpoints that stay only as the newest.
    """

    def __init__(self, storage: CheckpointStore, policy: Retention, *, saves_ephemeral: bool = False) -> None:
        self._storage = storage
        self._policy = policy
        self._keeps_all = policy.save_top_k < 0 and not saves_ephemeral
        self._resumed_step = -1
        self._committed: set[int] = set()
        """Steps that this run has committed."""
        self._checkpoints: dict[int, CheckpointStatus] | None = None
        """Checkpoints in the store, reduced to what the policy needs; None until the first commit."""

    def resumed(self, manifest: Manifest) -> None:
        """Note the checkpoint that the run resumed from: later ones that it has not saved itself are damaged."""
        self._resumed_step = manifest.step
        self._keeps_all = self._keeps_all and manifest.facts.keep != "ephemeral"

    def after_commit(self, manifest: Manifest) -> list[int]:
        """Delete what need not be kept now that ``manifest`` is committed, and return these steps, ascending."""
        self._committed.add(manifest.step)
        try:
            with explained_os_errors(self._storage.uri):
                return self._delete(manifest)
        except BaseException:
            self._checkpoints = None
            raise

    def _delete(self, manifest: Manifest) -> list[int]:
        if self._checkpoints is None and not self._keeps_all:
            self._checkpoints = self._read()
        elif self._checkpoints is None:
            self._checkpoints = {status.step: status for status in newest_first(self._storage, names_only=True)}
            for step in filter(self._is_skipped, list(self._checkpoints)):  # a permanent one stays
                self._checkpoints |= self._read(step)
        checkpoints = self._checkpoints
        checkpoints[manifest.step] = CheckpointStatus(
            step=manifest.step,
            state="committed",
            uri=f"{self._storage.uri}/{step_name(manifest.step)}",
            size_bytes=self._size_bytes(manifest.step),
            facts=CheckpointFacts(metrics=manifest.facts.metrics, keep=manifest.facts.keep),
        )
        while True:
            present = (checkpoints[step] for step in sorted(checkpoints) if not self._is_skipped(step))
            usable = [status for status in present if status.state == "committed"]
            if len(self._policy.kept(usable)) == len(checkpoints):
                return []
            statuses = [checkpoints[step] for step in sorted(checkpoints)]
            plan = plan_prune(self._storage, self._policy, deep=False, passed_over=self._is_skipped, statuses=statuses)
            if not plan.delete or self._policy.save_top_k < 0:  # then the others stay, however many there are
                break
            # Another program may have changed what counts.
            counted = self._policy.counted(usable)
            changed = [step for step in counted if self._size_bytes(step) != checkpoints[step].size_bytes]
            if not changed:
                break
            for step in changed:
                del checkpoints[step]
                checkpoints |= self._read(step)
        for step in plan.delete:
            delete_step(self._storage, step)
            del checkpoints[step]
        return list(plan.delete)

    def _read(self, step: int | None = None) -> dict[int, CheckpointStatus]:
        """Return the steps without the configuration, which every manifest has."""
        statuses = {}
        for status in newest_first(self._storage, step):
            facts = status.facts and CheckpointFacts(metrics=status.facts.metrics, keep=status.facts.keep)
            statuses[status.step] = replace(status, facts=facts)
        return statuses

    def _is_skipped(self, step: int) -> bool:
        """Return whether the run did not resume from ``step`` although it is later: it is damaged."""
        return step > self._resumed_step and step not in self._committed

    def _size_bytes(self, step: int) -> int:
        return sum(info.size_bytes for info in self._storage.list(step_prefix(step)))


def _kind(status: CheckpointStatus) -> str:
    return "regular" if status.facts is None else status.facts.keep
