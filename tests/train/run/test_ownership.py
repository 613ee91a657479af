"""Whole runs in one place: the second is refused, a killed one is followed at once, a copy is nobody's."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from nxdt_testing.errors import raises

from nxdt_core import checkpoint
from nxdt_core.cli import main
from nxdt_core.errors import NxdtError
from nxdt_core.errors.checkpoints import OwnershipLost, StoreInUse
from nxdt_core.errors.training import CannotWriteRunDirectory
from nxdt_core.run import train
from nxdt_core.run.callbacks.monitor import mark_failed
from nxdt_core.run.start import decide_start, directory_lock
from nxdt_core.train import build
from tests import processes
from tests.sampling import slow
from tests.train.small import SMALL

Run = Callable[..., "Child"]
MONITORED = ("exp_manager.monitoring.health_file=health.json", "exp_manager.monitoring.metrics_file=nxdt.prom")
ENDLESS = ("trainer.max_steps=100000", "checkpoint.every_n_train_steps=1", "checkpoint.save_top_k=2")


class Child:
    """``nxdt train`` in a process of its own; what it says goes to a file, which never fills up as a pipe does."""

    def __init__(self, config: Any, file: Path) -> None:
        file.write_text(yaml.safe_dump(config.to_dict()))
        words = [sys.executable, "-m", "nxdt_core", "train", str(file)]
        self._output = file.with_suffix(".out")
        with self._output.open("w") as output:
            self.process = processes.Popen(words, stdout=output, stderr=subprocess.STDOUT)

    @property
    def said(self) -> str:
        return self._output.read_text()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Run]:
    """``command(config)`` starts a run."""
    started: list[Child] = []

    def start(config: Any) -> Child:
        started.append(Child(config, tmp_path / f"run-{len(started)}.yaml"))
        return started[-1]

    yield start
    for child in started:
        child.process.kill()
        child.process.wait()


def files_of(run_dir: Path, *but: str) -> dict[str, tuple[int, bytes]]:
    """Return the time and the content of each file below a directory, and the time of each directory."""
    kept = (path for path in run_dir.rglob("*") if not {path.name, path.parent.name} & {*but})
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in kept}


def wait_for_steps(config: Any, count: int, child: Child, deadline_s: float = 120) -> list[int]:
    """Wait until step ``count`` or a later one is committed; returns those that are."""
    store = build.storage(config)
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        steps = [found.step for found in checkpoint.list_checkpoints(store) if found.state == "committed"]
        if steps and steps[-1] >= count:
            return steps
        assert child.process.poll() is None, child.said
        time.sleep(0.05)
    pytest.fail(f"no step {count} is committed after {deadline_s} s")


def test_a_second_run_is_refused_in_words_and_one_in_a_copied_directory_is_not(small_run, command, tmp_path):
    """The first goes on, undisturbed by both."""
    config = small_run(*ENDLESS, *MONITORED)
    first = command(config)
    wait_for_steps(config, 2, first)
    processes.pause(first.process)
    kept = files_of(config.run_dir)
    second = command(small_run(*ENDLESS, *MONITORED, "seed=99"))
    assert second.process.wait(timeout=120) == 2, second.said
    assert "[NXDT-S040]" in second.said
    assert f"{config.run_dir} belongs to 'run' (process {first.process.pid} on " in second.said
    assert "Traceback" not in second.said
    assert files_of(config.run_dir) == kept, "a run that is refused changes nothing"
    first.process.send_signal(signal.SIGCONT)

    copied = tmp_path / "elsewhere"
    while True:
        try:
            shutil.copytree(config.run_dir, copied / "run")
            break
        except shutil.Error:  # a checkpoint was pruned on the way
            shutil.rmtree(copied)
    newest = checkpoint.latest(build.storage(small_run(exp_dir=copied)), warn=print)
    summary = train(small_run(f"trainer.max_steps={newest.step + 2}", exp_dir=copied))
    assert summary.step == newest.step + 2
    assert first.process.poll() is None, first.said
    wait_for_steps(config, newest.step + 4, first)


@pytest.fixture
def ended(small_run):
    """A run with checkpoints, whose files describe it as running."""
    config = small_run("trainer.max_steps=1", *MONITORED)
    train(config)
    for name in ("health.json", "nxdt.prom"):
        path = config.run_dir / name
        path.write_text(re.sub(r'(state="running"}) 0', r"\1 1", path.read_text().replace('"finished"', '"running"')))
    return config


@pytest.mark.parametrize("held", ["directory", "checkpoints"])
@pytest.mark.parametrize("started", ["process", "launcher", slow("torchrun")])
def test_a_refused_run_changes_no_file(ended, held, started):
    """This process owns what the run wants."""
    store = directory_lock(ended.run_dir) if held == "directory" else build.storage(ended)
    keys = ["checkpoint.enabled=false"] if held == "directory" else []
    words = [] if started == "process" else ["trainer.devices=2"]
    run = (*SMALL, *MONITORED, "name=run", f"exp_manager.exp_dir={ended.run_dir.parent}")
    command = ["-m", "nxdt_core", "train", "recipe:llama-tiny", *run, *keys, *words]
    if started == "torchrun":
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command]
    own_lock = () if held == "directory" else (".nxdt-lock-run", ".nxdt-lock-owner")
    with checkpoint.owned(store, run="live", say=pytest.fail):
        before = files_of(ended.run_dir, *own_lock)
        done = processes.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
        assert files_of(ended.run_dir, *own_lock) == before
    where = ended.run_dir if held == "directory" else ended.checkpoint_uri
    assert f"[NXDT-S040] {where} belongs to 'live' (process" in done.stderr
    assert done.returncode == (1 if started == "torchrun" else 2), done.stderr


def test_a_lock_of_a_run_directory_is_not_written_through_a_link(small_run, tmp_path):
    config = small_run("trainer.max_steps=1")
    config.run_dir.mkdir()
    (tmp_path / "other").mkdir()
    (config.run_dir / ".nxdt-lock-run").symlink_to(tmp_path / "other")
    with raises(CannotWriteRunDirectory, match=r"\.nxdt-lock-run is a symbolic link"):
        train(config)
    assert list((tmp_path / "other").iterdir()) == []


def test_a_launcher_that_fails_marks_no_run_that_lives(ended):
    """Its port is taken, and that run is another."""
    with checkpoint.owned(directory_lock(ended.run_dir), run="live", say=pytest.fail):
        before = files_of(ended.run_dir)
        mark_failed(ended, "[NXDT-P044] Port 1 of 127.0.0.1 is taken.")
        assert files_of(ended.run_dir) == before
    mark_failed(ended, "[NXDT-P048] Rank 1 died.")
    health = json.loads((ended.run_dir / "health.json").read_text())
    assert (health["state"], health["error"]) == ("failed", "NXDT-P048")


def test_a_killed_run_is_followed_at_once_by_the_same_command(small_run, command):
    """Its loader's workers, which are forked from it, may live on for seconds."""
    config = small_run(*ENDLESS, "data.num_workers=2")
    first = command(config)
    wait_for_steps(config, 3, first)
    first.process.kill()
    first.process.wait()
    second = command(config)
    steps = [found.step for found in checkpoint.list_checkpoints(build.storage(config))]
    wait_for_steps(config, steps[-1] + 2, second)
    second.process.terminate()
    second.process.wait(timeout=120)
    assert "resuming from" in second.said
    assert "waiting" not in second.said
    newest = checkpoint.latest(build.storage(config), warn=pytest.fail)
    assert newest.step > steps[-1]
    assert newest.facts.fencing == 2


def test_a_run_gives_its_place_back_however_it_ends(small_run):
    config = small_run("trainer.max_steps=1")
    train(config)
    with pytest.raises(NxdtError, match="do not fit"):
        train(small_run("trainer.max_steps=2", "model.ffn_hidden_size=128"))
    checkpoint.own(build.storage(config), run="next", say=pytest.fail).release()
    train(config)
    checkpoint.own(build.storage(config), run="next", say=pytest.fail).release()


def test_a_run_whose_place_was_taken_commits_nothing_more(small_run, tmp_path):
    """Its directory is moved away while it runs, and another run begins there."""
    config = small_run("trainer.max_steps=3", "checkpoint.every_n_train_steps=1", "checkpoint.async_save=false")
    store = build.storage(config)
    taken: list[Any] = []
    commit = checkpoint.CheckpointManager.save

    def move_away_first(self: Any, *, step: int, **more: Any) -> Any:
        if step == 2:
            (config.run_dir / "checkpoints").rename(tmp_path / "moved")
            taken.append(checkpoint.own(store, run="other", say=pytest.fail))
        return commit(self, step=step, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.CheckpointManager, "save", move_away_first)
        with raises(OwnershipLost, match="another run began to save there, 'other'"):
            train(config)
    assert checkpoint.list_checkpoints(store) == []
    taken[0].check()


def test_a_run_that_saves_nothing_needs_no_place(small_run):
    config = small_run("trainer.max_steps=1")
    ownership = checkpoint.own(build.storage(config), run="other", say=pytest.fail)
    assert train(small_run("trainer.max_steps=1", "checkpoint.enabled=false")).step == 1
    ownership.release()


def test_a_place_is_owned_before_the_checkpoint_to_start_from_is_chosen(small_run, monkeypatch):
    config = small_run("trainer.max_steps=1")
    refused: list[StoreInUse] = []

    def own_then_decide(*arguments: Any, **keywords: Any) -> Any:
        with pytest.raises(StoreInUse) as caught:
            checkpoint.own(build.storage(config), run="other", say=pytest.fail)
        refused.append(caught.value)
        return decide_start(*arguments, **keywords)

    monkeypatch.setattr("nxdt_core.run.training.decide_start", own_then_decide)
    train(config)
    assert len(refused) == 1


def test_whatever_only_reads_works_while_a_run_owns_the_place(small_run, tmp_path, capfd):
    config = small_run("trainer.max_steps=1")
    train(config)
    uri = config.checkpoint_uri
    with checkpoint.owned(build.storage(config), run="other", say=pytest.fail) as ownership:
        for words in (
            ("checkpoint", "list", uri),
            ("checkpoint", "verify", uri, "--deep"),
            ("checkpoint", "diff", uri, uri),
            ("checkpoint", "export", uri, str(tmp_path / "out")),
            ("generate", uri, "In", "--max-new-tokens", "1"),
        ):
            assert main([*words]) == 0, (words, capfd.readouterr().err)
        ownership.check()
