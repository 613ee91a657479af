"""Which committed checkpoints are kept."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from nxdt_core.checkpoint import CheckpointFacts, CheckpointManager, list_checkpoints, prune
from nxdt_core.checkpoint.format.file_names import manifest_key
from nxdt_core.checkpoint.read.status import CheckpointStatus
from nxdt_core.checkpoint.write.retention import Retention
from tests.checkpoint.background import begin
from tests.checkpoint.memory import MemoryStorage


def status(step: int, loss: float | None = None, keep: Any = "regular") -> CheckpointStatus:
    metrics = {} if loss is None else {"loss": loss}
    facts = CheckpointFacts(metrics=metrics, keep=keep)
    return CheckpointStatus(step=step, state="committed", uri="memory", size_bytes=1, facts=facts)


LOSSES = {1: 5.0, 2: 3.0, 3: math.nan, 4: 1.0, 5: 4.0, 6: None, 7: 3.0, 8: 9.0}


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({"save_top_k": 2}, {7, 8}),
        ({"save_top_k": -1}, set(LOSSES)),
        ({"save_top_k": 0}, {8}),
        ({"keep_last": 3}, {6, 7, 8}),
        ({"save_top_k": 1, "monitor": "loss", "mode": "min"}, {4, 8}),
        ({"save_top_k": 2, "monitor": "loss", "mode": "min"}, {4, 7, 8}),  # of 2 and 7 with equal losses the newer
        ({"save_top_k": 2, "monitor": "loss", "mode": "max"}, {1, 8}),
        ({"save_top_k": 6, "monitor": "loss", "mode": "min"}, {1, 2, 4, 5, 7, 8}),
        ({"save_top_k": 7, "monitor": "loss", "mode": "min"}, {1, 2, 4, 5, 6, 7, 8}),  # without one: newest first
        ({"save_top_k": 1, "monitor": "loss", "mode": "min", "keep_last": 2}, {4, 7, 8}),
        ({"save_top_k": 2, "monitor": "accuracy"}, {7, 8}),
    ],
)
def test_a_policy_keeps_the_best_and_the_newest(policy: dict[str, Any], kept: set[int]) -> None:
    assert Retention(**policy).kept([status(step, loss) for step, loss in LOSSES.items()]) == kept


def test_permanent_ones_stay_and_ephemeral_ones_only_until_there_is_a_newer_one() -> None:
    kinds = {1: "permanent", 2: "regular", 3: "ephemeral", 4: "regular", 5: "ephemeral"}
    found = [status(step, keep=kind) for step, kind in kinds.items()]
    assert Retention(keep_last=1).kept(found) == {1, 4, 5}
    assert Retention(save_top_k=-1).kept(found) == {1, 2, 4, 5}
    assert Retention(save_top_k=-1).kept([*found, status(6)]) == {1, 2, 4, 6}


@pytest.mark.parametrize("policy", [{"keep_last": -1}, {"save_top_k": -2}])
def test_counts_that_mean_nothing_are_refused(policy: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="is -"):
        Retention(**policy)  # type: ignore[arg-type]


def test_a_run_deletes_after_each_commit_what_its_policy_lets_go(save: Any) -> None:
    storage = MemoryStorage()
    policy = Retention(save_top_k=1, monitor="loss", mode="min")
    manager = CheckpointManager(storage, after_commit=lambda manifest: prune(storage, policy, deep=False))
    left = []
    for step, loss in enumerate((3.0, 1.0, 2.0, 0.5), start=1):
        begin(manager, step, float(step), metrics={"loss": loss})
        manager.wait()
        left.append([each.step for each in list_checkpoints(storage)])
    assert left == [[1], [2], [2, 3], [4]]


def test_nothing_is_deleted_before_the_new_one_is_committed() -> None:
    class Watching(MemoryStorage):
        """Writes down what exists when something is deleted."""

        def delete_many(self, keys: Any) -> None:
            doomed = list(keys)
            if doomed == [manifest_key(1)]:
                seen.append(manifest_key(2) in self.objects)
            super().delete_many(doomed)

    seen: list[bool] = []
    storage = Watching()
    manager = CheckpointManager(storage, after_commit=lambda manifest: prune(storage, 1, deep=False))
    for step in (1, 2):
        begin(manager, step, float(step))
    manager.wait()
    assert seen == [True]


def test_a_sound_one_is_left_whatever_is_damaged(save: Any) -> None:
    """Random policies, kinds and damages; the newest sound checkpoint survives."""
    generator = random.Random(4)
    for _ in range(60):
        storage = MemoryStorage()
        steps = range(1, generator.randint(2, 7))
        for step in steps:
            kind: Any = generator.choice(["regular", "ephemeral", "permanent"])
            loss = {"loss": generator.random()} if generator.random() < 0.7 else {}
            save(storage, step, facts=CheckpointFacts(keep=kind, metrics=loss))
        sound = set(steps)
        for step in generator.sample(steps, generator.randint(0, len(steps))):
            key = next(
                key for key in storage.objects if key.startswith(f"step-{step:08d}/") and key.endswith("safetensors")
            )
            data, modified = storage.objects[key]
            storage.objects[key] = (bytes([data[0] ^ 1]) + data[1:], modified)
            sound.discard(step)
        policy = Retention(
            keep_last=generator.randint(0, 2),
            save_top_k=generator.randint(-1, 2),
            monitor=generator.choice(["step", "loss"]),
            mode=generator.choice(["min", "max"]),
        )
        deleted = prune(storage, policy)
        left = {each.step for each in list_checkpoints(storage)}
        assert left == set(steps) - set(deleted)
        assert not sound or left & sound, f"{policy} deleted every sound checkpoint"
        assert sound or not deleted


@pytest.mark.parametrize("shorter", [True, False])
def test_the_last_one_with_all_its_files_is_not_deleted_after_a_commit(save: Any, shorter: bool) -> None:
    storage = MemoryStorage()
    for step in (1, 2, 3):
        save(storage, step)
        if step > 1:
            key = next(key for key in storage.objects if key.startswith(f"step-{step:08d}/") and "/model/shard" in key)
            data, modified = storage.objects.pop(key)
            storage.objects |= {key: (data[:-1], modified)} if shorter else {}
    assert prune(storage, 1, deep=False) == []
    save(storage, 4)
    assert prune(storage, 1, deep=False) == [1, 2, 3]


@pytest.mark.parametrize("policy", [{"keep_last": 1}, {"save_top_k": 1, "monitor": "loss", "mode": "min"}])
def test_what_a_run_passed_over_counts_for_nothing(save: Any, policy: dict[str, Any]) -> None:
    """Damage that names and sizes do not show: steps 4 and 8 are later than the one that the run resumed from."""
    storage = MemoryStorage()
    for step in (2, 4, 6, 8):  # step 6 is the one just committed
        save(storage, step, facts=CheckpointFacts(metrics={"loss": 10.0 - step}))
    deleted = prune(storage, Retention(**policy), deep=False, passed_over=lambda step: step in (4, 8))
    assert deleted == [2, 4]
    assert [each.step for each in list_checkpoints(storage)] == [6, 8]


def test_a_permanent_one_that_was_passed_over_stays(save: Any) -> None:
    storage = MemoryStorage()
    for step, keep in ((2, "permanent"), (4, "regular"), (6, "regular")):
        save(storage, step, facts=CheckpointFacts(keep=keep))  # type: ignore[arg-type]
    assert prune(storage, 1, deep=False, passed_over=lambda step: step == 2) == [4]
