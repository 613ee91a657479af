"""Callbacks of a run: when they are called, what they may ask for, their state, and what becomes of those that fail."""

import json

import pytest
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool

from nxdt_core import checkpoint
from nxdt_core.errors.plugins import ComponentUnusable
from nxdt_core.errors.training import CallbackMethodUnknown, NotOurCallback, StepNotFinite
from nxdt_core.run import train
from nxdt_core.train import build
from tests.train.ema_run import averaged_run

PLUGIN = """
import json
from nxdt_core.api import Callback, Component, hookimpl
from nxdt_core.errors.training import StepNotFinite

class Seen(Callback):
    def __init__(self, config, run_dir):
        self.path, self.steps = run_dir / "seen.jsonl", 0

    def note(self, run, moment, **more):
        if run.rank == 0:
            with self.path.open("a") as file:
                file.write(json.dumps([moment, run.step, run.status, more]) + "\\n")

    def on_fit_start(self, run):
        self.note(run, "fit_start", steps=self.steps)

    def on_step_end(self, run):
        self.steps += 1
        self.note(run, "step_end")
        run.log({"mine": float(run.step), "board/mine": 1.0})

    def on_log(self, run, metrics):
        self.note(run, "log", names=sorted(name for name in metrics if "mine" in name))

    def on_validation_batch_end(self, run):
        self.note(run, "validation_batch_end")

    def on_validation_end(self, run):
        self.note(run, "validation_end", loss=run.metrics["val_loss"])

    def on_checkpoint_saved(self, run, manifest):
        self.note(run, "saved", step=manifest.step)

    def on_fit_end(self, run):
        self.note(run, "fit_end")

    def close(self, run):
        self.note(run, "close")

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

class Stops(Callback):
    def on_step_end(self, run):
        if run.step == 2 and run.rank == run.session.engine.ranks.world_size - 1:
            run.stop("enough is learnt")

class Saves(Callback):
    def on_step_end(self, run):
        if run.step in (1, 3):
            run.save()

class Fails(Callback):
    def on_log(self, run, metrics):
        raise ValueError("no figures, please")

class FailsInBoth(Fails):
    def on_step_end(self, run):
        run.log({"mine": 1.0})
        raise AssertionError("called although it had failed")

class Ends(Callback):
    def on_step_end(self, run):
        raise StepNotFinite(step=run.step, skipped=1, loss=1.0, grad_norm=1.0)

class Misspelt(Callback):
    def on_step_ended(self, run): ...

class Ours:
    def __init__(self, config, run_dir): ...

class TakesNothing(Callback):
    def __init__(self): ...

@hookimpl
def nxdt_callbacks():
    classes = (Seen, Stops, Saves, Fails, FailsInBoth, Ends, Misspelt, Ours, TakesNothing)
    return [Component(name=each.__name__, target=f"{__name__}:{each.__name__}") for each in classes]
"""


@pytest.fixture
def run_with(small_run, tmp_path):
    """``run_with(names, *overrides)``: the configuration of a run with these callbacks."""
    (tmp_path / "observing.py").write_text(PLUGIN)

    def make(names, *overrides):
        return small_run(f"plugins.local=[{tmp_path}/observing.py]", f"trainer.callbacks=[{names}]", *overrides)

    return make


def seen(config):
    return [json.loads(line) for line in (config.run_dir / "seen.jsonl").read_text().splitlines()]


def saved(config):
    return [entry.step for entry in checkpoint.list_checkpoints(build.storage(config)) if entry.state == "committed"]


VALIDATED = ("trainer.val_check_interval=2", "trainer.limit_val_batches=1", "trainer.num_sanity_val_steps=1")


def test_each_moment_is_called_and_state_survives_a_resume(run_with):
    train(run_with("Seen", "trainer.max_steps=2", *VALIDATED, "checkpoint.async_save=false"))
    config = run_with("Seen", "trainer.max_steps=3", *VALIDATED, "checkpoint.async_save=false")
    train(config)
    rows = [row for row in seen(config) if row[0] != "log"]
    loss = next(row[3] for row in rows if row[0] == "validation_end")
    step = lambda number: ["step_end", number, "running", {}]  # noqa: E731
    assert rows == [
        ["fit_start", 0, "running", {"steps": 0}],
        *(step(1), step(2)),
        ["validation_batch_end", 2, "running", {}],
        ["validation_end", 2, "running", loss],
        ["fit_end", 2, "finished", {}],
        ["saved", 2, "finished", {"step": 2}],
        ["close", 2, "finished", {}],
        ["fit_start", 2, "running", {"steps": 2}],
        step(3),
        ["fit_end", 3, "finished", {}],
        ["saved", 3, "finished", {"step": 3}],
        ["close", 3, "finished", {}],
    ]


def test_what_is_logged_reaches_callbacks_by_tag_and_the_checkpoint_by_name(run_with):
    config = run_with("Seen", "trainer.max_steps=2")
    train(config)
    assert ["log", 2, "running", {"names": ["board/mine", "train/mine"]}] in seen(config)
    assert checkpoint.latest(build.storage(config), warn=print).facts.metrics["mine"] == 2.0


def test_a_checkpoint_of_a_resumed_run_has_the_metrics_of_one_that_was_not_stopped(run_with):
    names = []
    for steps in (2, 3):
        config = run_with("Saves", f"trainer.max_steps={steps}")
        train(config)
        names.append(checkpoint.latest(build.storage(config), warn=print).facts.metrics.keys())
    assert names[0] == names[1]


def test_entries_of_one_component_have_their_own_state(run_with):
    train(run_with("Seen, Seen", "trainer.max_steps=2"))
    config = run_with("Seen, Seen", "trainer.max_steps=3")
    train(config)
    assert [row[3] for row in seen(config) if row[:2] == ["fit_start", 2]] == [{"steps": 2}] * 2


def test_a_callback_ends_a_run_in_order(run_with, capsys):
    config = run_with("Seen, Stops", "trainer.max_steps=9")
    summary = train(config)
    assert (summary.step, summary.exit_status, saved(config)) == (2, 0, [2])
    assert seen(config)[-1] == ["close", 2, "stopped", {}]
    assert "stopping after step 2: enough is learnt" in capsys.readouterr().err


def test_a_run_that_stops_between_two_rows_logs_its_last_step(run_with, metric_rows, capsys):
    config = run_with("Stops", "trainer.max_steps=9", "trainer.log_every_n_steps=5")
    summary = train(config)
    rows = metric_rows(config.run_dir)
    assert list(rows) == [2]
    assert rows[2]["loss"] == pytest.approx(summary.loss)
    assert f"step 2/9  loss {summary.loss:.4f}" in capsys.readouterr().err
    manifest = checkpoint.latest(build.storage(config), warn=print)
    assert manifest.facts.metrics["loss"] == pytest.approx(summary.loss)


WITHOUT_LABELS = """
from dataclasses import replace
import torch
from nxdt_core.api import Component, hookimpl
from nxdt_core.models.loss import CausalLM

class Every(CausalLM):
    least = 0

    def weight(self, batch):
        return super().weight(self.trained(batch))

    def __call__(self, logits, batch, step):
        return super().__call__(logits, self.trained(batch), step)

    def trained(self, batch):
        return replace(batch, labels=torch.where(batch.labels >= self.least, batch.labels, -100))

class Nothing(Every):
    least = 1000  # above all tokens

@hookimpl
def nxdt_objectives():
    return [Component(name=each.__name__, target=f"{__name__}:{each.__name__}") for each in (Every, Nothing)]
"""


@pytest.mark.parametrize(("objective", "warnings"), [("Every", 0), ("Nothing", 1)])
def test_steps_without_a_label_are_warned_of_once(small_run, metric_rows, tmp_path, caplog, objective, warnings):
    """By the first row, which is of the second step."""
    (tmp_path / "labelling.py").write_text(WITHOUT_LABELS)
    plugin = (f"plugins.local=[{tmp_path / 'labelling.py'}]", f"objective.name={objective}")
    config = small_run(*plugin, "trainer.max_steps=4", "trainer.log_every_n_steps=2")
    train(config)
    assert caplog.text.count("without a label with a weight, up to step 2: 2.") == warnings
    assert caplog.text.count("without a label") == warnings
    assert [row["loss"] == 0 for row in metric_rows(config.run_dir).values()] == [bool(warnings)] * 2


def test_one_rank_is_enough_to_end_a_run_of_two(tmp_path, run_with):
    config = run_with("Stops")
    plugin = (f"plugins.local=[{tmp_path}/observing.py]", "trainer.callbacks=[Stops]", "trainer.max_steps=9")
    layout = ("trainer.devices=2", "distributed_strategy.tensor_model_parallel_size=2")
    RankPool(2, lasting=True).run(averaged_run, str(tmp_path), *layout, *plugin, timeout_s=120)
    assert saved(config) == [3], "the step after the one that asked"


def test_a_callback_saves_a_step(run_with):
    config = run_with("Saves", "trainer.max_steps=4", "checkpoint.every_n_train_steps=100", "checkpoint.save_top_k=-1")
    train(config)
    assert saved(config) == [1, 3, 4]


@pytest.mark.parametrize("name", ["Fails", "FailsInBoth"])
def test_one_that_fails_is_named_and_the_others_go_on(run_with, caplog, name):
    config = run_with(f"{name}, Seen", "trainer.max_steps=3")
    assert train(config).step == 3
    assert [row[1] for row in seen(config) if row[0] == "step_end"] == [1, 2, 3]
    (record,) = [each for each in caplog.records if "the run continues without it" in each.getMessage()]
    assert f"observing:{name} failed in on_log" in record.getMessage()
    assert "ValueError: no figures, please" in record.getMessage()
    assert record.exc_info, "a fault of a program keeps its traceback"


def test_an_error_for_users_ends_the_run(run_with):
    config = run_with("Seen, Ends", "trainer.max_steps=3")
    with pytest.raises(StepNotFinite):
        train(config)
    assert seen(config)[-1] == ["close", 1, "failed", {}]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("Misspelt", CallbackMethodUnknown, r"on_step_ended.*\n.*on_step_end"),
        ("Ours", NotOurCallback, r"Ours.*\n.*subclass of nxdt_core\.api\.Callback"),
        ("TakesNothing", ComponentUnusable, r"TakesNothing.* called as Target\(config, run_dir\): too many positional"),
    ],
)
def test_what_no_run_would_call_is_refused(run_with, name, error, message):
    with raises(error, match=message):
        train(run_with(name, "trainer.max_steps=1"))
