"""Ctrl-C and SIGTERM: a real process, a checkpoint at a step boundary, and the run goes on from it."""

import signal
import subprocess
import sys

import pytest

from nxdt_core import checkpoint
from nxdt_core.run import train
from nxdt_core.train import build
from tests import processes
from tests.launch.launching import environment, wait_for_rows
from tests.sampling import slow


@pytest.mark.parametrize("number", [signal.SIGINT, slow(signal.SIGTERM)])
def test_a_signal_saves_and_stops_at_a_step_boundary(small_run, tmp_path, metric_rows, number):
    config = small_run("trainer.max_steps=100000")
    (tmp_path / "run.yaml").write_text(__import__("yaml").safe_dump(config.to_dict()))
    process = processes.Popen(
        [sys.executable, "-m", "nxdt_core", "train", str(tmp_path / "run.yaml")],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_for_rows(config.run_dir / "metrics.jsonl", 3, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    store = build.storage(config)
    manifest = checkpoint.latest(store, warn=print)
    assert manifest is not None
    assert manifest.step == max(metric_rows(config.run_dir))
    assert f"step-{manifest.step:08d}" in out
    resumed = small_run(f"trainer.max_steps={manifest.step + 1}")
    assert train(resumed).step == manifest.step + 1


STOPS = """
import os, signal
from nxdt_core.api import Callback, Component, hookimpl

class Stops(Callback):
    def __init__(self, config, run_dir):
        self.at, self.seen = os.environ.get("STOPS_AT", "").split(), run_dir / "seen.txt"

    def look(self, run, where, number):
        if self.at == [where, str(run.step), str(number)] and run.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_step_end(self, run):
        self.batches = 0
        self.look(run, "train", 0)

    def on_validation_batch_end(self, run):
        with self.seen.open("a") as file:
            file.write(f"{run.step} {self.batches}\\n")
        self.look(run, "validation", self.batches)
        self.batches += 1

@hookimpl
def nxdt_callbacks():
    return [Component(name="stops", target=f"{__name__}:Stops", summary="Sends a signal.")]
"""


@pytest.fixture
def validated(small_run, tmp_path):
    """A run that validates every second step, over several batches."""
    (tmp_path / "stops.py").write_text(STOPS)
    more = (f"plugins.local=[{tmp_path}/stops.py]", "trainer.callbacks=[{name: stops}]", "trainer.val_check_interval=2")
    early = "{monitor: val_loss, patience: 10}"
    stopping = ("exp_manager.create_early_stopping_callback=true",)
    stopping += (f"exp_manager.early_stopping_callback_params={early}",)
    size = ("data.validation_fraction=0.004", "trainer.limit_val_batches=4")

    def make(steps, *others, name="run"):
        return small_run(f"trainer.max_steps={steps}", *more, *size, *stopping, *others, name=name)

    return make


def seen(config):
    return [tuple(map(int, line.split())) for line in (config.run_dir / "seen.txt").read_text().splitlines()]


@pytest.mark.parametrize(
    ("at", "step", "batches"),
    [
        ("validation 2 1", 2, [(2, 0), (2, 1)]),
        ("validation 2 3", 2, [(2, 0), (2, 1), (2, 2), (2, 3)]),
        ("train 3 0", 3, [(2, number) for number in range(4)]),
    ],
    ids=["between", "last batch", "in training"],
)
def test_a_signal_ends_a_validation_and_nothing_is_lost(validated, metric_rows, monkeypatch, at, step, batches):
    monkeypatch.setenv("STOPS_AT", at)
    config = validated(4)
    stopped = train(config)
    assert (stopped.step, stopped.exit_status) == (step, 128 + signal.SIGTERM)
    assert stopped.checkpoint.endswith(f"step-{step:08d}")
    assert seen(config) == batches
    rows = config.run_dir / "validation.jsonl"
    assert rows.exists() == (step == 3), "part of the data gives no figure"
    monkeypatch.setenv("STOPS_AT", "")
    whole = validated(4, name="whole")
    train(whole)
    assert train(validated(4)).step == 4
    expected = metric_rows(whole.run_dir, "validation.jsonl")
    found = metric_rows(config.run_dir, "validation.jsonl")
    assert found[4] == expected[4]
    assert metric_rows(config.run_dir)[4]["loss"] == metric_rows(whole.run_dir)[4]["loss"]


def test_a_time_limit_ends_a_validation(validated, monkeypatch):
    config = validated(4, "trainer.max_time=1")
    monkeypatch.setattr("nxdt_core.run.training.seconds_of", lambda limit: 0.0)
    monkeypatch.setattr("nxdt_core.run.callbacks.stopping.TimeLimit.on_step_end", lambda *_: None)
    assert train(config).step == 2
    assert seen(config) == [(2, 0)]


@pytest.mark.parametrize(("batch", "last"), [(0, 1), (3, 3)])
def test_all_ranks_end_a_validation_together(validated, tmp_path, batch, last):
    config = validated(4, "trainer.devices=2")
    (tmp_path / "run.yaml").write_text(__import__("yaml").safe_dump(config.to_dict()))
    command = [sys.executable, "-m", "nxdt_core", "train", str(tmp_path / "run.yaml")]
    done = processes.run(
        command, capture_output=True, text=True, timeout=100, env=environment(STOPS_AT=f"validation 2 {batch}")
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert checkpoint.latest(build.storage(config), warn=print).step == 2
    assert sorted(seen(config)) == [(2, number) for number in range(last + 1) for _ in range(2)]


def test_a_stop_between_logged_steps_shows_the_loss_of_the_last_step(validated, metric_rows, monkeypatch, capsys):
    whole = validated(4, name="whole")
    train(whole)
    capsys.readouterr()
    monkeypatch.setenv("STOPS_AT", "train 3 0")
    stopped = train(validated(4, "trainer.log_every_n_steps=10", "trainer.enable_progress_bar=true"))
    assert stopped.loss == metric_rows(whole.run_dir)[3]["loss"]
    assert "step 3/4 |" in capsys.readouterr().err, "the bar moves without a logged step"
