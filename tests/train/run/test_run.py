"""Whole runs: what they write, how they stop, how they go on."""

import gc
import json
import math
import signal
import weakref
from importlib import metadata

import pytest
import torch
import yaml
from nxdt_testing.errors import raises

from nxdt_core import checkpoint
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.errors.models import VocabularyTooSmall
from nxdt_core.errors.training import (
    CannotWriteRunDirectory,
    NoCheckpointToResume,
    RunAlreadyHasCheckpoints,
    StepNotFinite,
)
from nxdt_core.kernel import Kernel
from nxdt_core.run import train
from nxdt_core.train import build
from nxdt_core.train.session import TrainSession
from tests.sampling import slow

KEYS = {
    "step",
    "consumed_samples",
    "consumed_tokens",
    "loss",
    "grad_norm",
    "skipped_steps",
    "lr",
    "tokens_per_s",
    "mfu",
    "mfu_palm",
    "data_wait_s",
    "step_time_s",
    "max_memory_bytes",
}


def same_weights(first, second):
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different


def test_a_run_writes_one_row_a_logged_step_with_the_promised_keys(small_run, metric_rows):
    config = small_run("trainer.max_steps=6", "trainer.log_every_n_steps=2")
    summary = train(config)
    rows = metric_rows(config.run_dir)
    assert list(rows) == [2, 4, 6]
    assert set(rows[2]) == KEYS
    assert rows[6]["consumed_samples"] == 48
    assert rows[6]["consumed_tokens"] == 48 * 32 == summary.consumed_tokens
    assert rows[6]["mfu"] is rows[6]["mfu_palm"] is None, "the peak of a CPU is not known"
    assert all(rows[6][key] > 0 for key in ("tokens_per_s", "step_time_s", "max_memory_bytes", "grad_norm"))
    assert rows[6]["loss"] == summary.loss < rows[2]["loss"] < math.log(272) + 0.5
    assert {path.name.partition(".out")[0] for path in config.run_dir.iterdir()} == {
        ".nxdt-lock-run",
        "cmd-args.log",
        "config.yaml",
        "logs",
        "metrics.jsonl",
        "saves.jsonl",
        "checkpoints",
        "events",
    }
    assert yaml.safe_load((config.run_dir / "config.yaml").read_text())["trainer"]["max_steps"] == 6


def test_a_run_leaves_neither_its_signal_handlers_nor_its_model(small_run, monkeypatch):
    made, build_model = [], TrainSession.build_model

    def remembered(session, **options):
        build_model(session, **options)
        made.extend(weakref.ref(parameter) for _, parameter in session.model.named_parameters())

    monkeypatch.setattr(TrainSession, "build_model", remembered)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train(small_run("trainer.max_steps=1", "checkpoint.enabled=false"))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    gc.collect()
    assert made
    assert not any(parameter() is not None for parameter in made)


@pytest.mark.slow
def test_tensorboard_has_the_same_figures(small_run, metric_rows):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = small_run("trainer.max_steps=3")
    train(config)
    events = EventAccumulator(str(config.run_dir))
    events.Reload()
    logged = {event.step: event.value for event in events.Scalars("train/loss")}
    assert logged == pytest.approx({step: row["loss"] for step, row in metric_rows(config.run_dir).items()})


def test_tags_are_grouped_and_restarts_are_marked(small_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    saves = ("checkpoint.every_n_train_steps=2", "checkpoint.async_save=false")
    saves += ("trainer.val_check_interval=2", "trainer.limit_val_batches=1")
    for steps in (2, 5):
        config = small_run(f"trainer.max_steps={steps}", *saves)
        train(config)
    # Two files of one second may be read in either order, by the number in their names.
    events = EventAccumulator(str(config.run_dir), purge_orphaned_data=False)
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"train/loss", "train/lr", "val/loss", "perf/tokens_per_s", "checkpoint/stall_s", "run/resumed"} <= set(tags)
    assert {tag.partition("/")[0] for tag in tags} == {"train", "val", "perf", "checkpoint", "run"}
    assert [event.step for event in events.Scalars("run/resumed")] == [2]
    (mark,) = (config.run_dir / "resumes.jsonl").read_text().splitlines()
    assert json.loads(mark)["step"] == 2


def test_the_logged_rate_is_the_schedules(small_run, metric_rows):
    config = small_run("trainer.max_steps=5")
    train(config)
    sched, optim = config.selected("schedule").config, config.run.model.optim
    floor = sched.min_lr / optim.lr
    for step, row in metric_rows(config.run_dir).items():
        done = step - 1
        if done < sched.warmup_steps:
            factor = (done + 1) / (sched.warmup_steps + 1)
        else:
            share = (done - sched.warmup_steps) / (40 - sched.warmup_steps)
            factor = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share))
        assert row["lr"] == pytest.approx(optim.lr * factor)


@pytest.mark.parametrize("workers", [slow(0), 2])
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(small_run, metric_rows, weights, workers):
    more = (f"data.num_workers={workers}",)
    whole = small_run("trainer.max_steps=8", *more, name="whole")
    train(whole)
    train(small_run("trainer.max_steps=3", *more, name="parts"))
    parts = small_run("trainer.max_steps=8", *more, name="parts")
    train(parts)
    first, second = metric_rows(whole.run_dir), metric_rows(parts.run_dir)
    assert [row["loss"] for row in first.values()] == [row["loss"] for row in second.values()]
    assert [row["grad_norm"] for row in first.values()] == [row["grad_norm"] for row in second.values()]
    assert second[8]["consumed_samples"] == 64
    same_weights(weights(whole), weights(parts))


def test_a_finished_run_has_nothing_to_do(small_run, metric_rows, capsys):
    config = small_run("trainer.max_steps=2")
    train(config)
    again = train(config)
    assert again.step == 2
    assert "step 2: nothing to do, trainer.max_steps is 2; raise it, or set another name" in capsys.readouterr().err
    assert len((config.run_dir / "metrics.jsonl").read_text().splitlines()) == 2
    train(small_run("trainer.max_steps=2", f"checkpoint.resume_from={config.run_dir / 'checkpoints'}", name="other"))
    said = capsys.readouterr().err
    assert f"step 2 of {config.run_dir / 'checkpoints'}: nothing to do" in said
    assert "checkpoint.weight_init_only" in said


@pytest.mark.slow
def test_a_resume_with_another_horizon_says_so(small_run, capsys):
    train(small_run("trainer.max_steps=2"))
    train(small_run("trainer.max_steps=3", "model.optim.sched.max_steps=50"))
    assert "learning-rate schedule now ends at step 50 instead of 40" in capsys.readouterr().err


def linear(done, end):
    return (done + 1) / 3 if done < 2 else max(0.0, (end - done) / (end - 2))


def stable_then_linear(done, end):
    start = end - 4
    return (done + 1) / 3 if done < 2 else 1.0 if done < start else max(0.0, (end - done) / 4)


@pytest.mark.parametrize(
    ("section", "factor"),
    [
        slow("name: LinearAnnealingWithWarmUp, warmup_steps: 2", linear),
        ("name: WSD, warmup_steps: 2, decay_steps: 4", stable_then_linear),
    ],
)
@pytest.mark.parametrize(
    ("end", "later"),
    [("'${trainer.max_steps}'",) * 2, slow("7", "11"), ("9", "9")],
    ids=["follows the run", "rewritten", "stays"],
)
def test_rates_after_a_resume_are_those_of_the_horizon_that_then_is(
    small_run, metric_rows, capsys, section, factor, end, later
):
    first = small_run("trainer.max_steps=7", f"model.optim.sched={{{section}, min_lr: 0.0, max_steps: {end}}}")
    train(first)
    longer = small_run("trainer.max_steps=11", f"model.optim.sched={{{section}, min_lr: 0.0, max_steps: {later}}}")
    train(longer)
    ends = [config.run.model.optim.sched.max_steps for config in (first, longer)]
    assert ends == ([9, 9] if later == "9" else [7, 11])
    peak = longer.run.model.optim.lr
    rates = {step: row["lr"] / peak for step, row in metric_rows(longer.run_dir).items()}
    wanted = {step: factor(step - 1, ends[step > 7]) for step in range(1, 12)}
    assert rates == pytest.approx(wanted)
    assert ("schedule now ends at step" in capsys.readouterr().err) == (later != "9")


def test_validation_runs_at_its_interval_and_leaves_training_alone(small_run, metric_rows):
    plain = small_run("trainer.max_steps=6", name="plain")
    train(plain)
    validated = small_run(
        "trainer.max_steps=6", "trainer.val_check_interval=3", "trainer.limit_val_batches=2", name="validated"
    )
    train(validated)
    rows = metric_rows(validated.run_dir, "validation.jsonl")
    assert list(rows) == [3, 6]
    assert rows[6]["loss"] < rows[3]["loss"]
    assert rows[3]["tokens"] == 2 * 8 * 32
    assert [r["loss"] for r in metric_rows(plain.run_dir).values()] == [
        r["loss"] for r in metric_rows(validated.run_dir).values()
    ]


@pytest.mark.parametrize(("limit", "batches"), [("0.5", 28), slow("1", 1), ("0", 0), slow("null", 55)])
def test_a_validation_takes_the_share_or_the_count_that_it_is_told(small_run, metric_rows, limit, batches):
    config = small_run("trainer.max_steps=1", "trainer.val_check_interval=1", f"trainer.limit_val_batches={limit}")
    train(config)
    if batches == 0:
        assert not (config.run_dir / "validation.jsonl").exists()
    else:
        tokens = metric_rows(config.run_dir, "validation.jsonl")[1]["tokens"]
        assert batches - 1 < tokens / (8 * 32) <= batches


def test_checkpoints_are_saved_at_the_interval_and_the_newest_kept(small_run):
    config = small_run("trainer.max_steps=7", "checkpoint.every_n_train_steps=2", "checkpoint.save_top_k=2")
    summary = train(config)
    store = build.storage(config)
    assert [(c.step, c.state) for c in checkpoint.list_checkpoints(store)] == [(6, "committed"), (7, "committed")]
    assert checkpoint.verify(store, 7) == []
    assert summary.checkpoint.endswith("step-00000007")


def test_a_new_run_does_not_mix_with_an_older_ones_checkpoints(small_run):
    config = small_run("trainer.max_steps=1", "checkpoint.resume_if_exists=false")
    train(config)
    with raises(RunAlreadyHasCheckpoints, match="up to step 1"):
        train(config)


def test_told_to_resume_from_nothing_is_an_error(small_run):
    with raises(NoCheckpointToResume):
        train(small_run("trainer.max_steps=1", "checkpoint.resume_ignore_no_checkpoint=false"))


def test_a_run_can_begin_with_the_weights_of_another(small_run, weights, metric_rows):
    first = small_run("trainer.max_steps=3", name="first")
    train(first)
    second = small_run(
        "trainer.max_steps=1",
        f"checkpoint.resume_from={first.checkpoint_uri}",
        "checkpoint.weight_init_only=true",
        "model.optim.lr=0.0",
        "model.optim.sched.min_lr=0.0",
        name="second",
    )
    summary = train(second)
    assert summary.step == 1
    assert metric_rows(second.run_dir)[1]["consumed_samples"] == 8
    before, after = weights(first), weights(second)
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("optim/"))


def test_a_damaged_checkpoint_is_passed_over_with_a_line(small_run, metric_rows, capsys):
    config = small_run("trainer.max_steps=4", "checkpoint.every_n_train_steps=2")
    train(config)
    shard = next((config.run_dir / "checkpoints" / "step-00000004").rglob("model/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    train(small_run("trainer.max_steps=5", "checkpoint.every_n_train_steps=2"))
    said = capsys.readouterr().err
    assert shard.name in said
    assert "resuming from" in said
    assert "step-00000002" in said
    assert list(metric_rows(config.run_dir)) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_bf16_autocast_trains_close_to_fp32(small_run, metric_rows):
    rows = {}
    for kind in ("fp32", "autocast"):
        config = small_run("trainer.max_steps=3", f"precision.type={kind}", name=kind)
        train(config)
        rows[kind] = [row["loss"] for row in metric_rows(config.run_dir).values()]
    assert rows["autocast"] == pytest.approx(rows["fp32"], rel=2e-2)
    assert rows["autocast"] != rows["fp32"]


@pytest.mark.parametrize(
    ("override", "error"),
    [("model.vocab_size=256", VocabularyTooSmall), ("model.max_position_embeddings=16", ConfigError)],
)
def test_what_cannot_fit_is_said_before_training(small_run, override, error):
    with raises(error):
        train(small_run("trainer.max_steps=1", override))


def test_a_run_directory_that_cannot_be_made_is_an_error(small_run, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with raises(CannotWriteRunDirectory):
        train(small_run("trainer.max_steps=1", exp_dir=tmp_path / "file"))


def test_another_model_cannot_resume_this_ones_checkpoint(small_run):
    train(small_run("trainer.max_steps=1"))
    with pytest.raises(NxdtError, match="do not fit"):
        train(small_run("trainer.max_steps=2", "model.ffn_hidden_size=128"))


BROKEN = ("trainer.max_steps=4", "model.optim.lr=1e30", "trainer.gradient_clip_val=null")
"""The first update makes weights that give no finite gradient."""


def test_a_run_stops_at_a_step_that_is_not_finite_and_its_weights_never_saw_it(small_run):
    config = small_run(*BROKEN, "checkpoint.every_n_train_steps=1")
    with pytest.raises(StepNotFinite) as error:
        train(config)
    assert (error.value.step, error.value.skipped) == (2, 1)
    store = build.storage(config)
    newest = checkpoint.latest(store, warn=print)
    assert newest.step == 1
    assert all(tensor.isfinite().all() for tensor in checkpoint.load_model(store, newest).values())


def test_a_run_may_go_on_and_counts_what_it_left_out_with_null_for_nan_in_the_file(small_run):
    config = small_run(*BROKEN, "trainer.nonfinite=skip")
    assert train(config).step == 4
    text = (config.run_dir / "metrics.jsonl").read_text()
    assert "NaN" not in text
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["skipped_steps"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["grad_norm"] is None
    store = build.storage(config)
    weights = checkpoint.load_model(store, checkpoint.latest(store, warn=print))
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_the_summary_names_the_checkpoint_that_holds_what_was_trained(small_run):
    """Not the highest number in the store: that one is damaged, and the run went on from the one before."""
    config = small_run("trainer.max_steps=4", "checkpoint.every_n_train_steps=2")
    train(config)
    shard = next((config.run_dir / "checkpoints" / "step-00000004").rglob("optim/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert train(small_run("trainer.max_steps=3")).checkpoint.endswith("step-00000003")
    repaired = small_run("trainer.max_steps=4")
    assert train(repaired).checkpoint.endswith("step-00000004")
    store = build.storage(repaired)
    assert checkpoint.verify(store, 4) == [], "saving the step again replaced the damaged one"


def test_a_trained_checkpoint_goes_to_hugging_face(small_run, tmp_path, weights):
    """The snippet of the Llama plugin's README."""
    from nxdt_core.config import load
    from nxdt_core.hf.directory import load_hf, save_hf

    config = small_run("trainer.max_steps=1")
    train(config)
    store, step = checkpoint.locate(config.checkpoint_uri)
    manifest = checkpoint.find_checkpoint(store, step, warn=print)
    builder = build.model_builder(load(manifest.facts.config))
    save_hf(tmp_path / "hf", builder, checkpoint.load_model(store, manifest))
    back = load_hf(tmp_path / "hf", builder)
    saved = weights(config)
    assert all(torch.equal(value, saved[name]) for name, value in back.items())


def test_a_checkpoint_says_what_made_it_and_how_good_it_is(small_run):
    config = small_run("trainer.max_steps=1")
    summary = train(config)
    facts = checkpoint.latest(build.storage(config), warn=print).facts
    assert facts.metrics.keys() == {"loss", "grad_norm", "lr", "skipped_steps"}
    assert facts.metrics["loss"] == summary.loss
    assert {name: version for name, version in facts.versions.items() if name in ("nxdt-core", "torch")} == {
        "nxdt-core": metadata.version("nxdt-core"),
        "torch": torch.__version__,
    }
    assert facts.versions["nxdt-plugin-llama"] == metadata.version("nxdt-plugin-llama")


def test_a_run_starts_no_second_kernel(small_run, monkeypatch):
    """It would import the plugins that ``plugins.block`` names."""
    config = small_run("trainer.max_steps=1")
    monkeypatch.setattr(Kernel, "start", lambda *_, **__: pytest.fail("a second kernel"))
    assert train(config).step == 1
