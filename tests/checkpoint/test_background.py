"""Saves that go on beside training: what is saved, when it counts, and what happens when one fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool

from nxdt_core.checkpoint import (
    CheckpointFacts,
    CheckpointManager,
    list_checkpoints,
    load_model,
    load_optimizer,
    load_state,
    read_manifest,
    verify,
)
from nxdt_core.checkpoint.format.shards import storable_shard
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.checkpoint.write.manager import SaveReport, StagingBuffers
from nxdt_core.errors.checkpoints import SameWeightsSaved, SaveTookTooLong, StorageDenied, StorageFull, UnsavableState
from tests.checkpoint import background
from tests.checkpoint.background import Gated, begin, poll_until
from tests.checkpoint.layouts.sharded import SHAPES, STEP, Layout, whole
from tests.checkpoint.memory import MemoryStorage
from tests.sampling import slow


def committed(storage: Any) -> list[int]:
    return [status.step for status in list_checkpoints(storage) if status.state == "committed"]


def test_what_is_changed_after_the_call_is_saved_as_it_was(tmp_path: Path) -> None:
    storage = Gated(str(tmp_path))
    manager = CheckpointManager(storage)
    model = {"w": torch.arange(6.0).reshape(2, 3), "bf16": torch.ones(3).bfloat16(), "turned": torch.ones(2, 3).t()}
    optimizer = {"w/exp_avg": torch.full((2, 3), 7.0)}
    generator, position = torch.arange(4), [1, 2]
    state = {"generator": generator, "position": position}
    expected = {name: tensor.clone() for name, tensor in model.items()}
    storage.gate.clear()
    manager.save(step=1, model=model, optimizer=optimizer, state=state, facts=CheckpointFacts())
    for tensor in (*model.values(), *optimizer.values(), generator):
        tensor.fill_(-1)
    position.append(3)
    storage.gate.set()
    manager.wait()
    manifest = read_manifest(storage, 1)
    assert verify(storage, 1) == []
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_model(storage, manifest).items())
    assert torch.equal(load_optimizer(storage, manifest)["w/exp_avg"], torch.full((2, 3), 7.0))
    saved = load_state(storage, manifest)
    assert saved["generator"].tolist() == [0, 1, 2, 3]
    assert saved["position"] == [1, 2]


def test_it_is_committed_without_another_call(tmp_path: Path) -> None:
    """Not at the next save, and not when the loop asks."""
    storage = LocalStorage(str(tmp_path))
    done = threading.Event()
    manager = CheckpointManager(storage, after_commit=lambda manifest: done.set())
    begin(manager, 1, 1.0)
    assert done.wait(background.LIMIT_S)
    assert committed(storage) == [1]


def test_the_loop_goes_on_while_a_save_is_written(tmp_path: Path) -> None:
    storage = Gated(str(tmp_path))
    told: list[SaveReport] = []
    manager = CheckpointManager(storage, on_saved=told.append)
    storage.gate.clear()
    assert begin(manager, 1, 1.0)
    manager.poll()
    assert (manager.busy, told, committed(storage)) == (True, [], [])
    storage.gate.set()
    poll_until(manager, lambda: not manager.busy)
    assert [report.manifest.step for report in told] == [1]
    assert told[0].manifest == read_manifest(storage, 1)
    assert 0 < told[0].blocked_s < told[0].seconds


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    storage = Gated(str(tmp_path))
    told: list[SaveReport] = []
    manager = CheckpointManager(storage, on_saved=told.append)
    storage.gate.clear()
    begin(manager, 1, 1.0)
    threading.Timer(0.3, storage.gate.set).start()
    assert begin(manager, 2, 2.0)
    assert committed(storage)[0] == 1
    manager.wait()
    assert committed(storage) == [1, 2]
    assert [report.manifest.step for report in told] == [1, 2]


def test_a_second_save_is_left_out_where_told_so(tmp_path: Path) -> None:
    storage = Gated(str(tmp_path))
    manager = CheckpointManager(storage, when_busy="skip")
    storage.gate.clear()
    assert begin(manager, 1, 1.0)
    assert not begin(manager, 2, 2.0)
    storage.gate.set()
    poll_until(manager, lambda: not manager.busy)
    assert begin(manager, 3, 3.0)
    manager.wait()
    assert committed(storage) == [1, 3]


def test_saving_at_once_takes_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagingBuffers, "stage", lambda *_: pytest.fail("a copy was made"))
    told: list[SaveReport] = []
    manager = CheckpointManager(LocalStorage(str(tmp_path)), on_saved=told.append)
    begin(manager, 1, 1.0, asynchronous=False)
    assert committed(manager.storage) == [1]
    assert told[0].blocked_s >= told[0].seconds


def test_memory_of_copies_is_reused(tmp_path: Path) -> None:
    buffers = StagingBuffers()
    share = storable_shard("w", torch.ones(4, 5))
    first = buffers.stage({"w": share, "b": storable_shard("b", torch.zeros(0))})["w"].tensor.data_ptr()
    other = storable_shard("w", torch.full((4, 5), 2.0))
    again = buffers.stage({"w": other, "b": storable_shard("b", torch.zeros(0))})["w"].tensor
    assert again.data_ptr() == first
    assert torch.equal(again, other.tensor)
    grown = buffers.stage({"w": storable_shard("w", torch.ones(6, 5))})["w"].tensor
    assert grown.shape == (6, 5)


def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    manager = CheckpointManager(LocalStorage(str(tmp_path)))
    with raises(UnsavableState, match="/thing"):
        manager.save(step=1, model={}, optimizer={}, state={"thing": object()}, facts=CheckpointFacts())
    assert not manager.busy
    begin(manager, 1, 1.0)
    manager.wait()


def test_a_failure_is_raised_at_the_next_step_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    storage = background.FullOn(str(tmp_path), full=False)
    manager = CheckpointManager(storage)
    begin(manager, 1, 1.0)
    manager.wait()
    storage.full = True
    begin(manager, 2, 2.0)
    with pytest.raises(StorageFull, match="disk 3"):
        poll_until(manager, lambda: False)
    assert [(status.step, status.state) for status in list_checkpoints(storage)] == [(1, "committed")]
    storage.full = False
    begin(manager, 3, 3.0)
    manager.wait()
    assert committed(storage) == [1, 3]


def test_what_is_asked_before_the_commit_prevents_it(tmp_path: Path) -> None:
    def refuse() -> None:
        raise StorageDenied(where="here", reason="another run owns it")

    manager = CheckpointManager(LocalStorage(str(tmp_path)), before_commit=refuse)
    begin(manager, 1, 1.0)
    with pytest.raises(StorageDenied, match="another run"):
        manager.wait()
    assert list_checkpoints(manager.storage) == []


def test_what_fails_after_the_commit_does_not_undo_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(manifest: Any) -> None:
        raise StorageDenied(where="here", reason="no right to delete")

    manager = CheckpointManager(LocalStorage(str(tmp_path)), after_commit=fail)
    begin(manager, 1, 1.0)
    manager.wait()
    assert committed(manager.storage) == [1]
    assert "no right to delete" in caplog.text


def test_a_save_beyond_its_deadline_is_an_error_and_never_committed(tmp_path: Path) -> None:
    storage = Gated(str(tmp_path))
    manager = CheckpointManager(storage, deadline_s=0.3)
    storage.gate.clear()
    begin(manager, 1, 1.0)
    with raises(SaveTookTooLong, match="step-00000001") as caught:
        poll_until(manager, lambda: False)
    assert caught.value.code == "NXDT-S051"
    thread = next(thread for thread in threading.enumerate() if thread.name.startswith("save "))
    storage.gate.set()
    thread.join(background.LIMIT_S)
    assert list_checkpoints(storage) == [], "it came back too late"


def test_stale_copies_are_not_committed_under_a_new_step(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    manager = CheckpointManager(storage)
    begin(manager, 1, 1.0)
    manager.wait()
    stage = StagingBuffers.stage
    old = {key: buffer.clone() for key, buffer in manager._staging._buffers.items()}

    def keep_old(self: StagingBuffers, pieces: Any) -> Any:
        staged = stage(self, pieces)
        for key, buffer in old.items():
            self._buffers[key].copy_(buffer)
        return staged

    monkeypatch.setattr(StagingBuffers, "stage", keep_old)
    begin(manager, 2, 2.0)
    with raises(SameWeightsSaved, match="bitwise identical to those of step-00000001, and 1 update") as caught:
        manager.wait()
    assert caught.value.code == "NXDT-S050"
    assert committed(storage) == [1]
    monkeypatch.undo()
    begin(manager, 2, 2.0)
    manager.wait()
    assert committed(storage) == [1, 2]


def test_equal_weights_are_saved_where_no_update_was_applied() -> None:
    storage = MemoryStorage()
    manager = CheckpointManager(storage)
    for step in (1, 2):
        manager.save(step=step, model={"w": torch.ones(3)}, optimizer={}, state={}, facts=CheckpointFacts(updates=1))
    manager.wait()
    assert committed(storage) == [1, 2]


def test_equal_weights_are_saved_where_told_so() -> None:
    storage = MemoryStorage()
    manager = CheckpointManager(storage, refuse_same_weights=False)
    for step in (1, 2):
        begin(manager, step, 1.0)
    manager.wait()
    assert committed(storage) == [1, 2]


def test_the_checkpoint_that_a_run_goes_on_from_counts_too() -> None:
    storage = MemoryStorage()
    first = CheckpointManager(storage)
    begin(first, 1, 1.0)
    first.wait()
    second = CheckpointManager(storage, newest=read_manifest(storage, 1))
    begin(second, 2, 1.0)
    with raises(SameWeightsSaved):
        second.wait()


@pytest.mark.parametrize("layout", [Layout(dp=2), slow(Layout(dp=2, tp=2))], ids=["dp2", "dp2 tp2"])
def test_ranks_save_their_shares_in_the_background(tmp_path: Path, layout: Layout) -> None:
    told = RankPool(layout.world, lasting=True).run(background.save_sharded, layout, str(tmp_path))
    assert told == [[STEP, STEP + 1]] * layout.world
    storage = LocalStorage(str(tmp_path))
    for step in (STEP, STEP + 1):
        assert verify(storage, step) == []
        model = load_model(storage, read_manifest(storage, step))
        optimizer = load_optimizer(storage, read_manifest(storage, step))
        assert all(torch.equal(model[name], whole(name)) for name in SHAPES)
        assert all(torch.equal(optimizer[f"{name}/exp_avg"], (whole(name) + 0.5) * 2) for name in SHAPES)


def test_what_a_rank_holds_may_change_between_saves(tmp_path: Path) -> None:
    RankPool(2, lasting=True).run(background.save_what_changes, str(tmp_path))
    storage = LocalStorage(str(tmp_path))
    found = {step: load_model(storage, read_manifest(storage, step)) for step in committed(storage)}
    shapes = {step: {name: list(tensor.shape) for name, tensor in model.items()} for step, model in found.items()}
    assert shapes == {1: {"w": [4]}, 2: {"w": [4]}, 3: {"w": [4], "mine": [3]}, 4: {"w": [6]}}


def test_all_ranks_raise_at_one_step_what_one_of_them_met(tmp_path: Path) -> None:
    found = RankPool(2, lasting=True).run(background.fail_and_go_on, str(tmp_path))
    assert found[0] == found[1]
    assert found[0]["error"][0] == "StorageFull"
    assert committed(LocalStorage(str(tmp_path))) == [1, found[0]["step"]]


def test_ranks_leave_out_the_same_saves(tmp_path: Path) -> None:
    found = RankPool(2, lasting=True).run(background.skip_when_busy, str(tmp_path))
    assert found[0] == found[1]
    assert found[0][0]
    assert not any(found[0][1:4])
    steps = [step for step, begun in enumerate(found[0], start=1) if begun]
    assert committed(LocalStorage(str(tmp_path))) == steps
    assert len(steps) > 1


def test_a_store_that_hangs_on_one_rank_ends_in_an_error_on_all(tmp_path: Path) -> None:
    found = RankPool(2).run(background.hang, str(tmp_path), 1.0)
    assert found[0]["steps"] == found[1]["steps"]
    assert {rank["error"][0] for rank in found} == {"SaveTookTooLong"}
    assert committed(LocalStorage(str(tmp_path))) == [1]
