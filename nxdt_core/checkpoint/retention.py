"""Which checkpoints may go. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from nxdt_core.checkpoint.faults import explained_os_errors
from nxdt_core.checkpoint.layout import manifest_key, step_prefix
from nxdt_core.checkpoint.status import list_checkpoints, verify
from nxdt_core.protocols.checkpoint_storage import CheckpointStorage

__all__ = ["PrunePlan", "delete_step", "plan_prune", "prune"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What :func:`prune` would do. Steps ascend."""

    keep: tuple[int, ...]
    """Committed steps that stay."""
    delete: tuple[int, ...]
    """Steps that go, whatever their state; empty where none of those to keep is sound."""
    sound: bool
    """Whether one of those to keep verifies."""


def plan_prune(storage: CheckpointStorage, keep_last: int, *, deep: bool = True) -> PrunePlan:
    """What :func:`prune` would delete; nothing is deleted. Arguments are those of :func:`prune`."""
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; the last checkpoint is never deleted")
    found = list_checkpoints(storage)
    good = [status.step for status in found if status.state == "committed"]
    kept, older = good[-keep_last:], good[:-keep_last]
    sound = any(not verify(storage, step, deep=deep) for step in reversed(kept))
    while older and not sound:
        kept.insert(0, older.pop())
        sound = not verify(storage, kept[0], deep=deep)
    doomed = [status.step for status in found if status.step < kept[0]] if sound else []
    return PrunePlan(keep=tuple(kept), delete=tuple(doomed), sound=sound)


def prune(storage: CheckpointStorage, keep_last: int, *, deep: bool = True) -> list[int]:
    """Keep the ``keep_last`` newest committed checkpoints and delete every step older than these.

    Unfinished and damaged steps do not count, and go when they are older than what is kept. Call it after a commit,
    never before. Nothing is deleted unless one of those kept verifies; where none does, older ones are kept until
    one does.

    Args:
        storage: where they lie.
        keep_last: at least 1.
        deep: verify by reading every byte of a kept checkpoint (mostly one). Without it, by names and sizes: for a
            caller that has just committed the newest and wants no second reading of it.

    Returns:
        The steps that were deleted, ascending.
    """
    plan = plan_prune(storage, keep_last, deep=deep)
    with explained_os_errors(storage.uri):
        for step in plan.delete:
            delete_step(storage, step)
    return list(plan.delete)


def delete_step(storage: CheckpointStorage, step: int) -> None:
    """Delete one step, the manifest first: what is left of an interrupted deletion is unfinished, never damaged."""
    storage.delete_many([manifest_key(step)])
    storage.delete_many([info.key for info in storage.list(step_prefix(step))])
