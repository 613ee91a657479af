"""What a run reads of older checkpoints after a save, and that it keeps what a full look at the store would."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from nxdt_core.checkpoint import (
    CheckpointFacts,
    Manifest,
    delete_step,
    latest,
    list_checkpoints,
    prune,
    read_manifest,
)
from nxdt_core.checkpoint.format.file_names import manifest_key, step_of, step_prefix
from nxdt_core.checkpoint.write.retention import Retention, RunRetention
from nxdt_core.protocols.store import CheckpointStore
from tests.checkpoint.faults import FaultyStorage
from tests.checkpoint.memory import MemoryStorage
from tests.checkpoint.saving import save_checkpoint

OLD = range(1, 41)


def save(storage: CheckpointStore, step: int, *, loss: float = 0.0, keep: Any = "regular") -> Manifest:
    return save_checkpoint(
        storage,
        step=step,
        model={"w": torch.full((4,), float(step))},
        optimizer={},
        state={"train": {"step": step}},
        facts=CheckpointFacts(metrics={"loss": loss}, keep=keep),
    )


@pytest.fixture(scope="module")
def many() -> dict[str, tuple[bytes, float]]:
    """The objects of a store with many checkpoints, each with a loss; every fourth is not permanent."""
    storage = MemoryStorage()
    for step in OLD:
        save(storage, step, loss=float(step % 7), keep="permanent" if step % 4 else "regular")
    return storage.objects


def manifests_read(storage: FaultyStorage) -> Counter[int | None]:
    reads = (call.removeprefix("read ") for call in storage.history if call.startswith("read "))
    return Counter(step_of(key.partition("/")[0]) for key in reads if key.endswith("/manifest.json"))


def whole_listings(storage: FaultyStorage) -> int:
    return storage.history.count("list step-")


def test_a_run_that_keeps_all_reads_no_older_manifest(many: Any) -> None:
    storage = FaultyStorage(MemoryStorage(config=dict(many)))
    retention = RunRetention(storage, Retention(save_top_k=-1))
    retention.resumed(read_manifest(storage, OLD[-1]))
    storage.strike()
    for step in (50, 51, 52):
        assert retention.after_commit(save(storage, step)) == []
    assert not manifests_read(storage).keys() & set(OLD)
    assert whole_listings(storage) == 1


@pytest.mark.parametrize(
    "policy",
    [
        {"save_top_k": 3},
        {"save_top_k": 3, "monitor": "loss", "mode": "min"},
        {"keep_last": 2, "save_top_k": 0},
    ],
)
def test_a_run_reads_each_older_manifest_once(many: Any, policy: dict[str, Any]) -> None:
    storage = FaultyStorage(MemoryStorage(config=dict(many)))
    retention = RunRetention(storage, Retention(**policy))
    retention.resumed(read_manifest(storage, OLD[-1]))
    storage.strike()
    deleted = []
    for step in range(50, 56):
        deleted += retention.after_commit(save(storage, step, loss=float(step)))
    read = manifests_read(storage)
    assert all(read[step] == 1 for step in OLD)
    assert max(read.values()) <= 4, "of the run's own: its save, the first look, and one verification"
    assert whole_listings(storage) == 1
    assert deleted, "the policy lets some go"


def test_the_newest_is_found_without_the_manifests_of_older_ones(many: Any) -> None:
    storage = FaultyStorage(MemoryStorage(config=dict(many)))
    found = latest(storage, warn=lambda line: None)
    assert found is not None
    assert manifests_read(storage).keys() == {OLD[-1]} == {found.step}


def test_a_run_keeps_what_a_full_look_at_the_store_would() -> None:
    """Random policies and kinds; between saves another program deletes or damages checkpoints."""
    generator = random.Random(7)
    for _ in range(40):
        before = MemoryStorage()
        for step in range(1, generator.randint(2, 9)):
            kind = generator.choice(["regular", "ephemeral", "permanent"])
            save(before, step, loss=generator.random(), keep=kind)
        resumed = generator.choice([status.step for status in list_checkpoints(before)])
        policy = Retention(
            keep_last=generator.randint(0, 2),
            save_top_k=generator.randint(0, 3),
            monitor=generator.choice(["step", "loss"]),
            mode=generator.choice(["min", "max"]),
        )
        one, other = (MemoryStorage(config=dict(before.objects)) for _ in range(2))
        retention = RunRetention(one, policy)
        retention.resumed(read_manifest(one, resumed))
        passed_over = {status.step for status in list_checkpoints(before) if status.step > resumed}
        for step in range(resumed + 1, resumed + 7):
            kind = generator.choice(["regular", "ephemeral", "permanent"])
            manifest = save(one, step, loss=generator.random(), keep=kind)
            delete_step(other, step)
            other.objects |= {key: one.objects[key] for key in one.objects if key.startswith(step_prefix(step))}
            passed_over -= {step}
            retention.after_commit(manifest)
            prune(other, policy, deep=False, passed_over=passed_over.__contains__)
            assert committed(one) == committed(other), policy
            interfere(generator, one, other)


def committed(storage: MemoryStorage) -> list[int]:
    return [status.step for status in list_checkpoints(storage) if status.state == "committed"]


def interfere(generator: random.Random, *stores: MemoryStorage) -> None:
    """Delete a checkpoint, or truncate a file of one, in all stores."""
    step = generator.choice(committed(stores[0]))
    if generator.random() < 0.3:
        for store in stores:
            delete_step(store, step)
    elif generator.random() < 0.3:
        key = next(key for key in stores[0].objects if key.startswith(step_prefix(step)) and "model" in key)
        for store in stores:
            store.objects[key] = (store.objects[key][0][:-1], 0.0)


def test_a_store_that_failed_is_looked_at_again(many: Any) -> None:
    storage = FaultyStorage(MemoryStorage(config=dict(many)))
    retention = RunRetention(storage, Retention(save_top_k=1))
    retention.resumed(read_manifest(storage, OLD[-1]))
    manifest = save(storage, 50)
    storage.strike(3)
    with pytest.raises(Exception, match="No space"):
        retention.after_commit(manifest)
    storage.strike()
    assert retention.after_commit(save(storage, 51)) == [*range(4, 41, 4), 50]
    assert storage.inner.stat(manifest_key(51)) is not None


def test_keeping_all_deletes_leftovers_of_interrupted_saves_and_no_permanent_one(many: Any) -> None:
    storage = MemoryStorage(config=dict(many))
    storage.delete_many([manifest_key(3)])
    retention = RunRetention(storage, Retention(save_top_k=-1))
    retention.resumed(read_manifest(storage, 30))  # 31 and later were damaged
    assert retention.after_commit(save(storage, 35)) == [3, 32]
    assert retention.after_commit(save(storage, 45)) == [36, 40]
