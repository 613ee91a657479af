"""Which checkpoints may go. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from nxdt_core.checkpoint.format.file_names import manifest_key, step_prefix
from nxdt_core.checkpoint.os_errors import explained_os_errors
from nxdt_core.checkpoint.read.status import CheckpointStatus, list_checkpoints, verify
from nxdt_core.protocols.store import CheckpointStore

__all__ = ["PrunePlan", "Retention", "delete_step", "plan_of", "plan_prune", "prune"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which committed checkpoints stay: the newest, those saved as permanent, and those that one of the two counts
    keeps.

    Ephemeral ones stay only as the newest, and count for neither.
    """

    keep_last: int = 0
    """Newest ones."""
    save_top_k: int = 0
    """Best ones by :attr:`monitor`; -1 keeps all."""
    monitor: str = "step"
    """Metric of the manifest that ranks them, or ``step``. Those without it, or with NaN, rank last."""
    mode: Literal["min", "max"] = "max"
    """Whether a small or a large metric is good; of equal ones the newer is better."""

    def __post_init__(self) -> None:
        if self.keep_last < 0 or self.save_top_k < -1:
            raise ValueError(f"keep_last is {self.keep_last}, save_top_k is {self.save_top_k}")

    def kept(self, committed: Sequence[CheckpointStatus]) -> set[int]:
        """Return the steps of those that stay; ``committed`` ascends."""
        return self.counted(committed) | {status.step for status in committed if _kind(status) == "permanent"}

    def counted(self, committed: Sequence[CheckpointStatus]) -> set[int]:
        """Return the steps of those that stay as the newest, or by one of the two counts; ``committed`` ascends."""
        regular = [status for status in committed if _kind(status) != "ephemeral"]
        best = sorted(regular, key=self._goodness, reverse=True)
        chosen = list(committed[-1:])
        chosen += regular[-self.keep_last :] if self.keep_last else []
        chosen += best if self.save_top_k < 0 else best[: self.save_top_k]
        return {status.step for status in chosen}

    def _goodness(self, status: CheckpointStatus) -> tuple[bool, float, int]:
        metrics = {} if status.facts is None else status.facts.metrics
        value = float(status.step) if self.monitor == "step" else metrics.get(self.monitor, math.nan)
        if math.isnan(value):
            return False, 0.0, status.step
        return True, value if self.mode == "max" else -value, status.step


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What :func:`prune` would do. Steps ascend."""

    keep: tuple[int, ...]
    """Committed steps that stay."""
    delete: tuple[int, ...]
    """Steps to delete, in any state; empty where none of those to keep is sound."""
    sound: bool
    """Whether one of those to keep verifies."""


def plan_prune(
    storage: CheckpointStore,
    keep: int | Retention,
    *,
    deep: bool = True,
    passed_over: Callable[[int], bool] = lambda step: False,
) -> PrunePlan:
    """Return what :func:`prune` would delete; nothing is deleted. Arguments are those of :func:`prune`."""
    if isinstance(keep, int):
        if keep < 1:
            raise ValueError(f"keep_last is {keep}; the last checkpoint is never deleted")
        keep = Retention(keep_last=keep)
    return plan_of(
        list_checkpoints(storage),
        keep,
        is_sound=lambda step: not verify(storage, step, deep=deep),
        passed_over=passed_over,
    )


def plan_of(
    found: Sequence[CheckpointStatus],
    keep: Retention,
    *,
    is_sound: Callable[[int], bool],
    passed_over: Callable[[int], bool],
) -> PrunePlan:
    """Return the plan of :func:`plan_prune` for the steps ``found``, which ascend; ``is_sound`` verifies one."""
    usable = [status for status in found if status.state == "committed" and not passed_over(status.step)]
    kept = keep.kept(usable)
    sound = next((step for step in sorted(kept, reverse=True) if is_sound(step)), None)
    others = [status.step for status in usable if status.step not in kept]
    while others and sound is None:
        kept.add(others[-1])
        sound = others[-1] if is_sound(others[-1]) else None
        others.pop()
    if sound is None:
        return PrunePlan(keep=tuple(sorted(kept)), delete=(), sound=False)
    unusable = [status for status in found if status not in usable and not status.is_link]
    broken = [status.step for status in unusable if status.step < sound and not _stays_intact(status)]
    return PrunePlan(keep=tuple(sorted(kept)), delete=tuple(sorted([*others, *broken])), sound=True)


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


def _stays_intact(status: CheckpointStatus) -> bool:
    """Whether ``status`` is permanent and shows no damage: a fault of reading may have been taken for one."""
    return status.state == "committed" and _kind(status) == "permanent"


def _kind(status: CheckpointStatus) -> str:
    return "regular" if status.facts is None else status.facts.keep
