"""What must hold of a store after a fault, and after the save that follows it. Each check returns what is wrong."""

from __future__ import annotations

import torch

from nxdt_core.checkpoint import list_checkpoints, load_model, read_manifest, verify
from nxdt_core.checkpoint.format.file_names import step_of, step_prefix
from nxdt_core.protocols.store import CheckpointStore
from tests.faults.job import KEEP, weights
from tests.faults.place import Place

__all__ = ["after_fault", "after_next_save"]


def after_fault(storage: CheckpointStore, *, before: list[int], step: int, error: Exception | None) -> list[str]:
    """Every committed checkpoint is whole, and none is lost that was to be kept.

    Args:
        storage: without faults.
        before: steps that were committed, the newest last.
        step: that was being saved.
        error: what the save told.
    """
    committed = [status.step for status in list_checkpoints(storage) if status.state == "committed"]
    wrong = [problem for each in committed for problem in verify(storage, each)]
    kept = [*before, step] if step in committed else before
    wrong += [f"step {each} is lost" for each in kept[-KEEP:] if each not in committed]
    if error is None and step not in committed:
        wrong.append("the save said nothing, and is not committed")
    return wrong


def after_next_save(
    place: Place, storage: CheckpointStore, *, steps: list[int], world: int, late: bool = False
) -> list[str]:
    """The steps that are kept are there, the newest with the values of its step, and nothing else is.

    Args:
        place: of ``storage``.
        storage: without faults.
        steps: that are kept, the newest last.
        world: ranks that saved.
        late: a save that was given up ended after the one that followed it, and may have left files in its step;
            they go with it.
    """
    found = list_checkpoints(storage)
    if [(status.step, status.state) for status in found] != [(step, "committed") for step in steps]:
        return [f"instead of {steps} there are {[(status.step, status.state) for status in found]}"]
    wrong = [problem for step in steps for problem in verify(storage, step)]
    newest = steps[-1]
    manifest = read_manifest(storage, newest)
    loaded, expected = load_model(storage, manifest), weights(newest, world, place.elements)
    if loaded.keys() != expected.keys() or not all(torch.equal(loaded[name], expected[name]) for name in expected):
        wrong.append(f"step {newest} holds other values than those that were saved")
    attempts = {info.key.split("/")[1] for info in storage.list(step_prefix(newest))}
    if not late and attempts != {"manifest.json", manifest.attempt}:
        wrong.append(f"step {newest} holds files of {len(attempts) - 1} attempts")
    others = {info.key for info in storage.list() if step_of(info.key.partition("/")[0]) is None}
    wrong += [f"{key} is left" for key in others if not key.startswith("owner-")]
    return wrong + ([] if late else [f"{name} is left" for name in place.leftovers()])
