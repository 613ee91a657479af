"""Keys of ``trainer`` that change how a run goes: passes, limits, trials, profiles, anomalies."""

import json

import pytest
from nxdt_testing.errors import raises

from nxdt_core import checkpoint
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.errors.training import LengthUnknown
from nxdt_core.run import train
from nxdt_core.train import build
from tests.sampling import slow

SAVING = "checkpoint"
SMALL_DATA = "trainer.limit_train_batches=3"
"""A pass of 24 samples."""


def steps_of(config):
    return [status.step for status in checkpoint.list_checkpoints(build.storage(config))]


def test_passes_end_a_run_validate_and_save(small_run, metric_rows):
    config = small_run(
        "trainer.max_steps=100",
        "model.optim.sched={name: CosineAnnealing, max_steps: 100, warmup_steps: 0}",
        "trainer.max_epochs=2",
        "trainer.check_val_every_n_epoch=1",
        f"{SAVING}.every_n_epochs=1",
        SMALL_DATA,
        "checkpoint.async_save=false",
    )
    summary = train(config)
    assert (summary.step, summary.max_steps) == (6, 6)
    assert list(metric_rows(config.run_dir, "validation.jsonl")) == [3, 6]
    assert steps_of(config) == [3, 6]
    assert metric_rows(config.run_dir)[6]["lr"] < 0.5 * config.run.model.optim.lr, "the curve ends with the passes"
    assert train(config).loss is None, "it has nothing left to do"
    assert "trainer.max_epochs=4" in summary.resume_command
    assert "trainer.max_steps=100" in summary.resume_command


def test_a_run_that_saves_nothing_has_no_command_that_resumes_it(small_run):
    summary = train(small_run("trainer.max_steps=2", "checkpoint.enabled=false"))
    assert (summary.step, summary.checkpoint, summary.resume_command) == (2, None, None)
    assert "resume" not in str(summary)
    saved = train(small_run("trainer.max_steps=2"))
    assert f"resume:     {saved.resume_command}" in str(saved)


def test_steps_end_a_run_before_the_passes_do(small_run):
    assert train(small_run("trainer.max_steps=2", "trainer.max_epochs=2", SMALL_DATA)).step == 2


@pytest.mark.parametrize(("passes", "steps", "left"), [(1, 2, 4), (2, 5, 0)])
def test_samples_that_do_not_fill_a_step_are_counted(small_run, tmp_path, capsys, passes, steps, left):
    """20 samples in batches of 8."""
    (tmp_path / "text.txt").write_text("a" * (20 * 32 + 1))
    data = (f"data.train_files=[{tmp_path}/text.txt]", "data.validation_fraction=0", "data.add_eos=false")
    assert train(small_run("trainer.max_steps=100", f"trainer.max_epochs={passes}", *data)).step == steps
    said = f"note: trainer.max_epochs {passes} takes {steps} steps of 8 samples; the last {left} samples"
    assert (said in capsys.readouterr().err) == bool(left)


def test_a_pass_is_the_data_over_the_global_batch(small_run):
    config = small_run("trainer.max_steps=100000", "trainer.max_epochs=1", "trainer.limit_train_batches=0.002")
    train_split = build.dataset(config, build.tokenizer(config)).split("train")
    batches = -(-len(train_split) // 8)
    assert train(config).step == -(-batches * 2 // 1000)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.max_epochs=0"], "0 trains nothing"),
        (["trainer.limit_train_batches=0.0"], "0 trains nothing"),
        (["trainer.check_val_every_n_epoch=1", "trainer.val_check_interval=5"], "it counts passes over the data"),
        ([f"{SAVING}.every_n_epochs=1", "checkpoint.every_n_train_steps=5"], "it counts passes over the data"),
    ],
)
def test_what_contradicts_itself_is_refused(small_run, overrides, message):
    with pytest.raises(ConfigError, match=message):
        small_run("trainer.max_steps=1", *overrides)


STREAM = """
from nxdt_core.api import Component, hookimpl
from nxdt_core.protocols.batch import Sample
from nxdt_core.protocols.dataset import DatasetSplits, IterableDataset

class Stream(IterableDataset):
    def __iter__(self):
        while True:
            yield Sample(input_ids=list(range(32)), labels=list(range(32)))
    def state_dict(self):
        return {}
    def load_state_dict(self, state): ...
    def fingerprint(self):
        return "stream"

class Streams(DatasetSplits):
    def __init__(self, config, context): ...
    def split(self, name):
        return Stream() if name == "train" else None

@hookimpl
def nxdt_datasets():
    return [Component(name="streams", target="streams:Streams", summary="Endless.")]
"""


@pytest.mark.parametrize(
    "override", ["trainer.max_epochs=1", "trainer.limit_train_batches=3", "trainer.overfit_batches=1"]
)
def test_a_stream_has_no_passes_and_no_beginning(tmp_path, monkeypatch, override):
    from nxdt_core.config import load
    from tests.train.small import SMALL

    (tmp_path / "streams.py").write_text(STREAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "run.yaml").write_text(
        """
name: run
trainer: {max_steps: 2}
data: {name: streams, seq_length: 32}
model: {name: llama, vocab_size: 64, num_attention_heads: 2, optim: {lr: 1e-3}}
"""
    )
    local = f"plugins.local=['{tmp_path}/streams.py']"
    overrides = (*SMALL, f"exp_manager.exp_dir={tmp_path}", local, override)
    with raises(LengthUnknown, match=override.partition("=")[0]):
        train(load(str(tmp_path / "run.yaml"), overrides))


def test_few_batches_are_learnt_by_heart_and_validated(small_run, metric_rows):
    more = ("trainer.overfit_batches=1", "trainer.val_check_interval=20", "model.optim.lr=0.01")
    config = small_run("trainer.max_steps=40", *more, "trainer.log_every_n_steps=40", "data.global_batch_size=4")
    train(config)
    validated = metric_rows(config.run_dir, "validation.jsonl")
    assert validated[40]["loss"] < validated[20]["loss"] < 5.5
    assert validated[40]["tokens"] <= 4 * 32
    assert validated[40]["loss"] == pytest.approx(metric_rows(config.run_dir)[40]["loss"], rel=0.2)


@pytest.mark.parametrize(("wanted", "steps"), [slow("true", 1), ("2", 2)])
def test_a_trial_leaves_the_run_alone(small_run, tmp_path, metric_rows, wanted, steps):
    train(small_run("trainer.max_steps=4"))
    before = sorted(path for path in (tmp_path / "run").rglob("*"))
    config = small_run("trainer.max_steps=100", f"trainer.fast_dev_run={wanted}")
    summary = train(config)
    trial = tmp_path / "run" / "fast_dev_run"
    assert "trainer.fast_dev_run=false" in summary.resume_command
    assert (summary.step, summary.run_dir, summary.checkpoint) == (steps, trial, None)
    assert list(metric_rows(trial)) == list(range(1, steps + 1))
    assert list(metric_rows(trial, "validation.jsonl")) == [steps]
    assert not list(trial.glob("events*"))
    assert [path for path in sorted((tmp_path / "run").rglob("*")) if not path.is_relative_to(trial)] == before


def test_a_profile_is_written_to_the_run(small_run):
    config = small_run("trainer.max_steps=6", "trainer.profiler=pytorch")
    train(config)
    directory = config.run_dir / "profile" / "rank-00000"
    (trace,) = directory.glob("*training_step*.json")
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::scaled_dot_product_attention" in names or "aten::mm" in names


@pytest.mark.parametrize("kind", [slow("simple"), "advanced"])
def test_a_table_of_times_is_written_to_the_run(small_run, kind):
    config = small_run("trainer.max_steps=2", f"trainer.profiler={kind}")
    train(config)
    (table,) = (config.run_dir / "profile" / "rank-00000").iterdir()
    assert "(train_step)" in table.read_text()
    assert ("threading.py" in table.read_text()) == (kind == "advanced"), "a simple one has functions of nxdt alone"


def test_the_operation_behind_a_gradient_that_is_none_is_named(small_run, monkeypatch):
    import torch

    from nxdt_core.models.norm import RMSNorm

    def broken(self, hidden):
        return (hidden - hidden).sqrt() + hidden  # whose gradient is infinite

    monkeypatch.setattr(RMSNorm, "forward", broken)
    with pytest.raises(RuntimeError, match=r"SqrtBackward0|returned nan"):
        train(small_run("trainer.max_steps=1", "trainer.detect_anomaly=true"))
    assert not torch.is_anomaly_enabled()
