"""Runs that save while they train: what is saved, which are kept, what it costs, what stops a run."""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool, RanksFailed

from nxdt_core import checkpoint
from nxdt_core.checkpoint.stores.local import LocalStorage
from nxdt_core.checkpoint.write.manager import StagingBuffers
from nxdt_core.cli import main
from nxdt_core.errors.checkpoints import SameWeightsSaved, StorageFull
from nxdt_core.run import log, train
from nxdt_core.run.callbacks import checkpoints
from nxdt_core.run.callbacks.checkpoints import STEPS, SaveMetrics
from nxdt_core.train import build
from tests.train.small import SMALL


def train_here(arguments):
    return main(arguments)


def train_where_rank_1_runs_out_of_space(arguments):
    """From step 4 on."""
    open_write = LocalStorage.open_write

    def full(self, key):
        if os.environ["RANK"] == "1" and key.startswith("step-00000004/"):
            raise StorageFull(where=key, reason="no space left")
        return open_write(self, key)

    LocalStorage.open_write = full
    return main(arguments)


def train_by_a_clock(arguments):
    """Twenty seconds pass whenever somebody looks, on each rank for itself."""
    clock = iter(range(0, 10_000, 20))
    checkpoints.time = SimpleNamespace(**{**vars(time), "monotonic": lambda: next(clock)})
    return main(arguments)


def on_two_ranks(where, *more):
    settings = ("trainer.devices=2", "checkpoint.every_n_train_steps=2", "checkpoint.save_top_k=-1", "name=two")
    return ["train", "recipe:llama-tiny", *SMALL, *settings, f"exp_manager.exp_dir={where}", *more]


def steps(config):
    return [entry.step for entry in checkpoint.list_checkpoints(build.storage(config)) if entry.state == "committed"]


def model_of(config, step):
    store = build.storage(config)
    return checkpoint.load_model(store, checkpoint.read_manifest(store, step))


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_checkpoint_holds_its_step_whatever_training_did_meanwhile(small_run):
    long = small_run("trainer.max_steps=4", "checkpoint.every_n_train_steps=1", "checkpoint.save_top_k=-1", name="long")
    train(long)
    short = small_run("trainer.max_steps=2", "checkpoint.async_save=false", name="short")
    train(short)
    assert steps(long) == [1, 2, 3, 4]
    expected = model_of(short, 2)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model_of(long, 2).items())


@pytest.mark.parametrize("in_background", ["true", "false"])
def test_every_save_is_reported(small_run, metric_rows, capsys, in_background):
    often = ("checkpoint.every_n_train_steps=12", f"checkpoint.async_save={in_background}")
    config = small_run("trainer.max_steps=26", *often, "data.global_batch_size=4")
    train(config)
    said = capsys.readouterr().err
    for step in (12, 24, 26):
        assert f"step {step}: checkpoint saved to {config.checkpoint_uri}/step-{step:08d} (" in said
    saves = {row["step"]: row for row in rows(config.run_dir / "saves.jsonl")}
    assert list(saves) == [12, 24, 26]
    for row in saves.values():
        assert set(row) == {"step", "blocked_s", "seconds", "bytes", "gb_per_s", "slowdown"}
        assert min(row["blocked_s"], row["seconds"], row["gb_per_s"]) > 0
    store = build.storage(config)
    assert saves[12]["bytes"] == checkpoint.read_manifest(store, 12).size_bytes
    assert saves[12]["slowdown"] is not None
    assert saves[26]["slowdown"] is None, "no step followed"
    logged = metric_rows(config.run_dir)
    assert "checkpoint_age_s" not in logged[11]
    shown = {key: logged[26][f"checkpoint_{key}"] for key in ("blocked_s", "seconds", "bytes", "gb_per_s")}
    assert shown in [{key: saves[step][key] for key in shown} for step in (12, 24)], "of the newest that has ended"
    assert "checkpoint_slowdown" in logged[26]
    assert logged[26]["checkpoint_age_s"] > 0


def test_slowdown_compares_ten_steps_with_the_ten_before(monkeypatch):
    clock, written = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    metrics = SaveMetrics(
        SimpleNamespace(append=lambda name, row: written.append((name, row["step"], row["slowdown"])))
    )

    def take(*seconds):
        for spent in seconds:
            clock.now += spent
            metrics.step_ended()

    metrics.step_began()
    take(9.0, *[1.0] * STEPS)
    metrics.begun(11)
    clock.now += 100.0  # of the save itself
    metrics.step_began()
    take(*[1.5] * STEPS, 50.0)
    manifest = SimpleNamespace(step=11, size_bytes=1)
    metrics.saved(SimpleNamespace(manifest=manifest, captured_at=0.0, blocked_s=1.0, seconds=1.0, gigabytes_per_s=1.0))
    assert written == [("saves.jsonl", 11, 0.5)]


def test_a_save_that_fails_stops_the_run_and_the_checkpoint_before_stays(small_run, monkeypatch):
    open_write = LocalStorage.open_write

    def full(self, key):
        if key.startswith("step-00000004/"):
            raise StorageFull(where=key, reason="no space left")
        return open_write(self, key)

    monkeypatch.setattr(LocalStorage, "open_write", full)
    config = small_run("trainer.max_steps=50", "checkpoint.every_n_train_steps=2")
    with pytest.raises(StorageFull, match="step-00000004"):
        train(config)
    assert steps(config) == [2]
    monkeypatch.undo()
    assert train(small_run("trainer.max_steps=5", "checkpoint.resume_if_exists=true")).step == 5


def test_stale_copies_stop_a_run(small_run, monkeypatch):
    """The copies are made once and never again, while the run goes on."""
    stage = StagingBuffers.stage
    made = []

    def once(self, pieces):
        made.append(made[0] if made else stage(self, pieces))
        return made[-1]

    monkeypatch.setattr(StagingBuffers, "stage", once)
    config = small_run("trainer.max_steps=6", "checkpoint.every_n_train_steps=2")
    with raises(SameWeightsSaved, match="bitwise identical to those of step-00000002, and 2 update"):
        train(config)
    assert steps(config) == [2]


@pytest.mark.parametrize("reason", ["no learning rate", "nothing finite"])
def test_weights_that_nothing_has_changed_are_saved_again(small_run, monkeypatch, reason):
    overrides = ["model.optim.lr=0", "model.optim.sched.min_lr=0"]
    if reason == "nothing finite":
        overrides = ["trainer.nonfinite=skip"]
        monkeypatch.setattr(torch, "isfinite", lambda tensor: torch.zeros_like(tensor, dtype=torch.bool))
    config = small_run("trainer.max_steps=4", "checkpoint.every_n_train_steps=2", *overrides)
    train(config)
    assert steps(config) == [2, 4]
    first, second = model_of(config, 2), model_of(config, 4)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_the_best_by_a_metric_of_their_own_step_are_kept(small_run, weights):
    settings = (
        "trainer.val_check_interval=2",
        "trainer.limit_val_batches=1",
        "checkpoint.every_n_train_steps=2",
        "checkpoint.monitor=val_loss",
        "checkpoint.mode=max",
        "checkpoint.save_top_k=2",
    )
    config = small_run("trainer.max_steps=8", *settings)
    train(config)
    store = build.storage(config)
    losses = {row["step"]: row["loss"] for row in rows(config.run_dir / "validation.jsonl")}
    assert losses[2] > losses[4] > losses[6] > losses[8], "the run learns"
    assert steps(config) == [2, 4, 8], "the two worst, as told, and the newest"
    for step in steps(config):
        metrics = checkpoint.read_manifest(store, step).facts.metrics
        assert metrics["val_loss"] == pytest.approx(losses[step])
        assert metrics["grad_norm"] > 0
    whole = weights(config)
    for step in (8, 6):
        checkpoint.delete_step(store, step)
    train(small_run("trainer.max_steps=8", *settings, "checkpoint.resume_if_exists=true"))
    resumed = weights(config)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items()), "saved between two steps"


def test_permanent_and_ephemeral_checkpoints(small_run):
    config = small_run(
        "trainer.max_steps=9",
        "checkpoint.permanent_every_n_steps=4",
        "checkpoint.ephemeral_every_n_steps=1",
        "checkpoint.every_n_train_steps=3",
        "checkpoint.save_top_k=1",
    )
    train(config)
    store = build.storage(config)
    kinds = {step: checkpoint.read_manifest(store, step).facts.keep for step in steps(config)}
    assert kinds == {4: "permanent", 8: "permanent", 9: "regular"}


@pytest.mark.parametrize("sound", [None, 2])
def test_a_damaged_newest_checkpoint_never_makes_retention_delete_good_ones(small_run, sound):
    """One flipped bit, which names and sizes do not show, in a checkpoint later than all that the next run commits."""
    settings = ("checkpoint.every_n_train_steps=2", "checkpoint.resume_if_exists=true")
    config = small_run("trainer.max_steps=6", f"checkpoint.save_top_k={1 if sound is None else -1}", *settings)
    train(config)
    for step in {2, 4, 6} - {sound}:
        for shard in (config.run_dir / "checkpoints" / f"step-{step:08d}").glob("*/model/*.safetensors"):
            data = bytearray(shard.read_bytes())
            data[-3] ^= 1
            shard.write_bytes(data)
    resumed = small_run("trainer.max_steps=5", "checkpoint.save_top_k=1", *settings)
    summary = train(resumed)
    store = build.storage(resumed)
    assert summary.checkpoint.endswith("step-00000005")
    assert checkpoint.latest(store, warn=lambda line: None).step == 5
    assert steps(resumed) == [5, 6]


@pytest.mark.parametrize(("kept", "reads"), [(-1, 1), (8, 2)])
def test_a_resumed_run_reads_older_manifests_at_its_start_only(small_run, monkeypatch, kept, reads):
    """Once for the number of its ownership; once more to apply a policy that deletes, however many saves follow."""
    settings = ("checkpoint.every_n_train_steps=1", f"checkpoint.save_top_k={kept}")
    train(small_run("trainer.max_steps=4", *settings))
    read, opened = LocalStorage.open_read, []
    monkeypatch.setattr(
        LocalStorage, "open_read", lambda self, key, *where: opened.append(key) or read(self, key, *where)
    )
    config = small_run("trainer.max_steps=8", *settings, "checkpoint.resume_if_exists=true")
    train(config)
    monkeypatch.undo()
    assert [opened.count(f"step-{step:08d}/manifest.json") for step in (1, 2, 3)] == [reads] * 3
    assert steps(config) == list(range(1, 9))


def test_checkpoints_by_the_clock(small_run, monkeypatch):
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: next(clock)}))
    config = small_run(
        "trainer.max_steps=12", "checkpoint.train_time_interval={seconds: 45}", "checkpoint.save_top_k=-1"
    )
    train(config)
    found = steps(config)
    assert found[-1] == 12
    assert 1 < len(found) < 6
    gaps = {after - before for before, after in pairwise(found[:-1])}
    assert len(gaps) <= 1, "at an even pace of the clock"


def test_a_save_is_left_out_while_another_one_goes_on(small_run, monkeypatch, capsys):
    """The first shard is held back until a later step has been told that it has to wait."""
    said = []
    open_write = LocalStorage.open_write

    def slow(self, key):
        while "shard" in key and not any("no checkpoint" in line for line in said):
            time.sleep(0.01)
        return open_write(self, key)

    say = log.Console.say
    monkeypatch.setattr(log.Console, "say", lambda self, line, row=None: (said.append(line), say(self, line, row)))
    monkeypatch.setattr(LocalStorage, "open_write", slow)
    config = small_run(
        "trainer.max_steps=8",
        "checkpoint.every_n_train_steps=1",
        "checkpoint.when_busy=skip",
        "checkpoint.save_top_k=-1",
    )
    train(config)
    assert any(line.startswith("step 2: no checkpoint, ") for line in said)
    assert steps(config)[0] == 1
    assert 2 not in steps(config)
    assert steps(config)[-1] == 8


def test_two_ranks_save_while_they_train(small_run, tmp_path):
    assert RankPool(2).run(train_here, on_two_ranks(tmp_path, "trainer.max_steps=5"), timeout_s=120) == [0, 0]
    config = small_run(name="two")
    assert steps(config) == [2, 4, 5]
    assert [checkpoint.verify(build.storage(config), step) for step in steps(config)] == [[]] * 3
    alone = small_run("trainer.max_steps=4", name="alone")
    train(alone)
    expected = model_of(alone, 4)
    assert all(torch.allclose(tensor, expected[name], atol=1e-5) for name, tensor in model_of(config, 4).items())


def test_what_fails_on_one_of_two_ranks_ends_the_run_once(small_run, tmp_path):
    arguments = on_two_ranks(tmp_path, "trainer.max_steps=100000")
    with pytest.raises(RanksFailed) as failed:
        RankPool(2).run(train_where_rank_1_runs_out_of_space, arguments, timeout_s=120)
    accounts = "".join(failed.value.accounts.values())
    assert accounts.count("NXDT-S001") == 1
    assert "Traceback" not in accounts
    assert steps(small_run(name="two")) == [2]


def test_two_ranks_save_by_the_clock_of_the_first(small_run, tmp_path):
    arguments = on_two_ranks(tmp_path, "trainer.max_steps=10", "checkpoint.train_time_interval={seconds: 45}")
    arguments.remove("checkpoint.every_n_train_steps=2")
    assert RankPool(2).run(train_by_a_clock, arguments, timeout_s=120) == [0, 0]
    found = steps(small_run(name="two"))
    assert len(found) > 2
    assert all(after - before > 2 for before, after in pairwise(found[:-1])), "one save for each interval"
