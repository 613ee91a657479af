"""A run's directory that cannot be written any more: what is lost, what is not, and what ends the run.

``/dev/full`` is a real file that takes nothing: it replaces a file that a run has opened, as a disk that fills does.
"""

import resource
import shutil
from types import SimpleNamespace

import pytest
from nxdt_testing.errors import raises
from nxdt_testing.ranks import RankPool, RanksFailed

from nxdt_core import checkpoint
from nxdt_core.cli import main
from nxdt_core.errors.training import CannotWriteRunDirectory
from nxdt_core.run import train
from nxdt_core.run.loggers import TensorBoard
from nxdt_core.train import build
from tests import private_mounts
from tests.train.small import SMALL

FULL = """
import os
from pathlib import Path
from nxdt_core.api import Callback, Component, hookimpl

class Full(Callback):
    def __init__(self, config, run_dir):
        self.run_dir = Path(run_dir).resolve()

    def on_step_end(self, run):
        for name in os.listdir("/proc/self/fd"):
            try:
                opened = os.readlink(f"/proc/self/fd/{{name}}")
            except FileNotFoundError:
                continue
            if opened == str(self.run_dir / {name!r}):
                full = os.open("/dev/full", os.O_WRONLY)
                os.dup2(full, int(name))
                os.close(full)

@hookimpl
def nxdt_callbacks():
    return [Component(name="full", target=f"{{__name__}}:Full")]
"""
IN_THE_WAY = """
from nxdt_core.api import Callback, Component, hookimpl

class InTheWay(Callback):
    def __init__(self, config, run_dir): ...

    def on_fit_start(self, run):
        (run.config.run_dir / "generations.jsonl").mkdir()

@hookimpl
def nxdt_callbacks():
    return [Component(name="in-the-way", target=f"{__name__}:InTheWay")]
"""
BROKEN_LOGGER = """
from nxdt_core.api import Callback, Component, hookimpl

class Broken(Callback):
    calls = 0

    def __init__(self, config, run_dir): ...

    def on_log(self, run, metrics):
        Broken.calls += 1
        if Broken.calls == 2:
            raise ConnectionError("nobody answers")
        assert Broken.calls == 1, "it was asked again"

@hookimpl
def nxdt_callbacks():
    return [Component(name="broken", target=f"{__name__}:Broken")]
"""
READ_ONLY = """
import subprocess
from nxdt_core.api import Callback, Component, hookimpl

class ReadOnly(Callback):
    def __init__(self, config, run_dir): ...

    def on_checkpoint_saved(self, run, manifest):
        where = run.config.run.checkpoint.uri
        subprocess.run(["mount", "--bind", where, where], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", where], check=True)

@hookimpl
def nxdt_callbacks():
    return [Component(name="read-only", target=f"{__name__}:ReadOnly")]
"""
SAVES = ("checkpoint.every_n_train_steps=2", "checkpoint.save_top_k=-1", "trainer.val_check_interval=3")


@pytest.fixture
def plugin(tmp_path):
    """``plugin(text)``: the override that loads a plugin file with that text."""

    def write(text):
        path = tmp_path / "disk.py"
        path.write_text(text)
        return f"plugins.local=[{path}]"

    return write


@pytest.fixture
def full(plugin):
    """``full(name)``: overrides of a run that finds the disk full once it has opened the file ``name``."""
    return lambda name: (plugin(FULL.format(name=name)), "trainer.callbacks=[full]")


def steps(config):
    return [entry.step for entry in checkpoint.list_checkpoints(build.storage(config)) if entry.state == "committed"]


def train_here(arguments):
    return main(arguments)


@pytest.mark.parametrize("name", ["saves.jsonl", "validation.jsonl"])
def test_a_record_that_cannot_be_written_ends_the_run_with_a_checkpoint(small_run, full, capsys, name):
    config = small_run("trainer.max_steps=40", *full(name), *SAVES)
    with raises(CannotWriteRunDirectory, match="No space left on device"):
        train(config)
    said = capsys.readouterr().err
    assert said.count("stopping after this step") == 1
    last = steps(config)[-1]
    assert f"step {last}: checkpoint saved" in said
    assert last < 40
    assert (config.run_dir / "metrics.jsonl").read_text().count("\n") == last, "no step is lost"
    assert checkpoint.verify(build.storage(config), last) == []
    (config.run_dir / name).unlink()
    resumed = small_run(f"trainer.max_steps={last + 1}", "checkpoint.resume_if_exists=true", *SAVES)
    assert train(resumed).step == last + 1


@pytest.mark.slow  # one process ends with the same error
def test_two_ranks_end_alike(small_run, tmp_path, full):
    settings = ("trainer.devices=2", "name=two", "trainer.max_steps=100000", *full("saves.jsonl"))
    arguments = ["train", "recipe:llama-tiny", *SMALL, *SAVES, *settings, f"exp_manager.exp_dir={tmp_path}"]
    with pytest.raises(RanksFailed) as failed:
        RankPool(2).run(train_here, arguments, timeout_s=120)
    accounts = "".join(failed.value.accounts.values())
    assert accounts.count("NXDT-T007") == 1
    assert "Traceback" not in accounts
    config = small_run(name="two")
    assert checkpoint.verify(build.storage(config), steps(config)[-1]) == []


@pytest.mark.parametrize("kind", ["full", "in the way"])
def test_a_log_that_cannot_be_written_is_reported_once(small_run, full, capsys, kind):
    name = "logs/globalrank-0_localrank-0.txt"
    config = small_run("trainer.max_steps=3", *(full(name) if kind == "full" else ()))
    log = config.run_dir / name
    if kind == "in the way":
        log.mkdir(parents=True)
    assert train(config).step == 3
    said = capsys.readouterr().err
    assert said.count(f"The log {log} is incomplete: ") == 1
    assert "step 3/3" in said


def test_a_full_disk_does_not_empty_the_configuration_of_an_earlier_start(small_run):
    config = small_run("trainer.max_steps=1")
    train(config)
    before = (config.run_dir / "config.yaml").read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 100, hard))
    try:
        with raises(CannotWriteRunDirectory, match="File too large"):
            train(small_run("trainer.max_steps=2", "checkpoint.resume_if_exists=true"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (config.run_dir / "config.yaml").read_text() == before


def test_a_logger_that_fails_gets_no_more_rows_and_the_run_continues(small_run, plugin, caplog):
    logger = "exp_manager.loggers=[{name: broken}]"
    config = small_run("trainer.max_steps=4", plugin(BROKEN_LOGGER), logger)
    assert train(config).step == 4
    assert caplog.text.count("failed in on_log, and the run continues without it: ConnectionError: nobody answers") == 1
    assert (config.run_dir / "metrics.jsonl").read_text().count("\n") == 4


def test_event_files_that_cannot_be_written_are_reported_without_a_traceback(tmp_path, capfd, caplog):
    logger = TensorBoard(None, tmp_path / "run")
    run = SimpleNamespace(step=1)
    logger.on_log(run, {"loss": 1.0})
    shutil.rmtree(tmp_path / "run")
    logger.on_log(run, {"loss": 1.0})
    logger.close(run)
    assert "event files" in caplog.text
    assert "Traceback" not in capfd.readouterr().err


def test_texts_that_cannot_be_written_do_not_end_the_run(small_run, plugin, caplog):
    callback = "trainer.callbacks=[in-the-way, {name: generations, prompts: [In], max_new_tokens: 1}]"
    config = small_run("trainer.max_steps=4", "trainer.val_check_interval=2", plugin(IN_THE_WAY), callback)
    assert train(config).step == 4
    assert caplog.text.count("generations.jsonl is incomplete: Is a directory") == 1


def test_a_store_that_becomes_read_only_keeps_what_is_committed(plugin, tmp_path):
    where, store = tmp_path / "run", tmp_path / "store"
    settings = (f"exp_manager.exp_dir={where}", f"checkpoint.uri={store}", "trainer.max_steps=100000", *SAVES)
    program = "from nxdt_core.cli import main\nsys.exit(main(['train', 'recipe:llama-tiny', *sys.argv[1:]]))"
    done = private_mounts.run(program, *SMALL, *settings, plugin(READ_ONLY), "trainer.callbacks=[read-only]")
    assert done.returncode == 2, done.stderr
    assert "NXDT-S002" in done.stderr
    assert "Read-only file system" in done.stderr
    assert "Traceback" not in done.stderr
    storage = checkpoint.open_storage(str(store))
    assert [(entry.step, entry.state) for entry in checkpoint.list_checkpoints(storage)] == [(2, "committed")]
    assert checkpoint.verify(storage, 2) == []
