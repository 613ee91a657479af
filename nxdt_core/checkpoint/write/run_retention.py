"""Deleting, after each commit of a run, what its policy does not keep. Torch-free.

Only one run saves to a store, so what is there is looked up once. Later saves read nothing of older checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

from nxdt_core.checkpoint.format.file_names import step_name, step_prefix
from nxdt_core.checkpoint.format.manifest import CheckpointFacts, Manifest
from nxdt_core.checkpoint.os_errors import explained_os_errors
from nxdt_core.checkpoint.read.status import CheckpointStatus, newest_first, verify
from nxdt_core.checkpoint.write.retention import PrunePlan, Retention, delete_step, plan_of
from nxdt_core.protocols.store import CheckpointStore

__all__ = ["RunRetention"]


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
        self._found: dict[int, CheckpointStatus] | None = None
        """What is in the store, reduced to what the policy needs; None until the first commit."""

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
            self._found = None
            raise

    def _delete(self, manifest: Manifest) -> list[int]:
        if self._found is None:
            self._found = self._look()
        found = self._found
        found[manifest.step] = CheckpointStatus(
            step=manifest.step,
            state="committed",
            uri=f"{self._storage.uri}/{step_name(manifest.step)}",
            size_bytes=self._size_bytes(manifest.step),
            facts=_needed(manifest.facts),
        )
        while (plan := self._plan(found)).delete and self._update_counted(found):
            pass
        for step in plan.delete:
            delete_step(self._storage, step)
            del found[step]
        return list(plan.delete)

    def _plan(self, found: dict[int, CheckpointStatus]) -> PrunePlan:
        usable = self._usable(found)
        kept = self._policy.kept(usable)
        if len(kept) == len(found):
            return PrunePlan(keep=tuple(sorted(kept)), delete=(), sound=False)
        return plan_of(
            [found[step] for step in sorted(found)],
            self._policy,
            is_sound=lambda step: not verify(self._storage, step, deep=False),
            passed_over=self._is_passed_over,
        )

    def _update_counted(self, found: dict[int, CheckpointStatus]) -> bool:
        """Look again at counted checkpoints whose size differs from the known one; return whether there were any."""
        if self._policy.save_top_k < 0:  # others stay regardless of how many there are
            return False
        counted = self._policy.counted(self._usable(found))
        changed = [step for step in counted if self._size_bytes(step) != found[step].size_bytes]
        for step in changed:
            del found[step]
            found |= self._read(step)
        return bool(changed)

    def _look(self) -> dict[int, CheckpointStatus]:
        if not self._keeps_all:
            return self._read()
        found = {status.step: status for status in newest_first(self._storage, names_only=True)}
        for step in filter(self._is_passed_over, list(found)):  # a permanent one stays
            found |= self._read(step)
        return found

    def _read(self, step: int | None = None) -> dict[int, CheckpointStatus]:
        return {status.step: _reduced(status) for status in newest_first(self._storage, step)}

    def _usable(self, found: dict[int, CheckpointStatus]) -> list[CheckpointStatus]:
        usable = (found[step] for step in sorted(found) if not self._is_passed_over(step))
        return [status for status in usable if status.state == "committed"]

    def _is_passed_over(self, step: int) -> bool:
        """Whether the run did not resume from ``step`` although it is later: it is damaged."""
        return step > self._resumed_step and step not in self._committed

    def _size_bytes(self, step: int) -> int:
        return sum(info.size_bytes for info in self._storage.list(step_prefix(step)))


def _reduced(status: CheckpointStatus) -> CheckpointStatus:
    """Without the configuration, which every manifest has."""
    return replace(status, facts=None if status.facts is None else _needed(status.facts))


def _needed(facts: CheckpointFacts) -> CheckpointFacts:
    return CheckpointFacts(metrics=facts.metrics, keep=facts.keep)
