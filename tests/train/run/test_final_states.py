"""The state that a run leaves in its health file is what became of it."""

import json
import signal
import time

import pytest

from nxdt_core.errors.checkpoints import StorageError
from nxdt_core.run import train
from tests.launch.launching import FAULTY, finish, ranks_of, start, wait_for_rows
from tests.train.small import SMALL

HEALTH = "exp_manager.monitoring.health_file=health.json"
METRICS = "exp_manager.monitoring.metrics_file=nxdt.prom"
ENDLESS = "trainer.max_steps=100000"
SIGNALLED = """
import os, signal
from nxdt_core.api import Callback, Component, hookimpl


class Signalled(Callback):
    def __init__(self, config, run_dir): ...

    def on_step_end(self, run):
        if run.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


@hookimpl
def nxdt_callbacks():
    return [Component(name="signalled", target=f"{__name__}:Signalled")]
"""


def health(config):
    found = json.loads((config.run_dir / "health.json").read_text())
    return tuple(found[key] for key in ("state", "error", "step", "checkpoint_step"))


@pytest.fixture
def signalled(tmp_path):
    """Keys of a run that gets a signal in its second step."""
    (tmp_path / "signalled.py").write_text(SIGNALLED)
    return (f"plugins.local=[{tmp_path / 'signalled.py'}]", "trainer.callbacks=[signalled]", HEALTH)


def test_a_run_that_a_signal_stops_is_stopped_with_its_checkpoint(small_run, signalled):
    config = small_run(ENDLESS, *signalled)
    step = train(config).step
    assert health(config) == ("stopped", None, step, step)


def test_a_stopped_run_without_checkpoints_has_none(small_run, signalled):
    config = small_run(ENDLESS, *signalled, "checkpoint.enabled=false")
    step = train(config).step
    assert health(config) == ("stopped", None, step, None)


def test_a_run_that_stops_early_saves_although_its_last_step_would_not_be(small_run, signalled):
    config = small_run(ENDLESS, *signalled, "checkpoint.save_last=false")
    step = train(config).step
    assert health(config) == ("stopped", None, step, step)


def test_a_signal_in_the_last_step_leaves_a_run_finished(small_run, signalled):
    """Nothing is left to do, and that step is not saved."""
    config = small_run("trainer.max_steps=2", *signalled, "checkpoint.save_last=false")
    assert train(config).exit_status == 128 + signal.SIGTERM
    assert health(config) == ("finished", None, 2, None)


def test_a_run_that_runs_out_of_time_is_stopped_with_its_checkpoint(small_run):
    config = small_run(ENDLESS, "trainer.max_time=00:00:00:01", HEALTH)
    step = train(config).step
    assert health(config) == ("stopped", None, step, step)


def test_a_run_with_nothing_left_to_do_still_names_its_checkpoint(small_run):
    config = small_run("trainer.max_steps=2", HEALTH, "checkpoint.resume_if_exists=true")
    train(small_run("trainer.max_steps=2"))
    train(config)
    assert health(config) == ("finished", None, 2, 2)


def test_a_save_that_fails_leaves_a_run_failed_with_the_checkpoint_before(small_run):
    config = small_run("trainer.max_steps=3", "checkpoint.every_n_train_steps=1", "checkpoint.async_save=false", HEALTH)
    (config.run_dir / "checkpoints").mkdir(parents=True)
    (config.run_dir / "checkpoints" / "step-00000002").touch()
    with pytest.raises(StorageError) as caught:
        train(config)
    assert health(config) == ("failed", caught.value.code, 2, 1)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_second_signal_leaves_a_run_interrupted_without_its_last_steps(small_run, tmp_path, devices):
    """The first rank sleeps after its second step, so that the first signal is not enough."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    plugin = (f"plugins.local=[{tmp_path / 'faulty.py'}]", "trainer.callbacks=[faulty]")
    saving = ("checkpoint.every_n_train_steps=1", "checkpoint.async_save=false")
    keys = (*SMALL, f"exp_manager.exp_dir={tmp_path}", "name=run", ENDLESS, *saving, HEALTH, METRICS)
    arguments = ["recipe:llama-tiny", *keys, *plugin, f"trainer.devices={devices}"]
    process = start(arguments, FAULT="sleep 0 2", PYTHONPATH=str(tmp_path))
    config = small_run()
    wait_for_rows(config.run_dir / "metrics.jsonl", 2, process)
    assert devices == 1 or len(ranks_of(process)) == 2
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    status, _, err = finish(process)
    assert status == 130, err
    state, error, _, saved = health(config)
    assert (state, error) == ("interrupted", None)
    assert saved in (None, 1)
    assert 'nxdt_state{run="run",state="interrupted"} 1' in (config.run_dir / "nxdt.prom").read_text()
