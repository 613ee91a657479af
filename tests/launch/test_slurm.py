"""``nxdt launch slurm --submit`` to a real Slurm on this machine: two tasks, requeued, resume with the same losses.

Skipped where Slurm is not installed; `make test` installs nothing of the system.
"""

from __future__ import annotations

import sys
import time

import pytest

from tests import processes
from tests.launch.launching import environment
from tests.launch.slurm_cluster import cluster, missing
from tests.train.small import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(bool(missing()), reason=missing())]

STEPS = 10
WAITS = """
import os, time
from pathlib import Path
from nxdt_core.api import Callback, Component, hookimpl

HERE = Path(__file__).parent

class Waits(Callback):
    def __init__(self, config, run_dir): ...

    def on_step_end(self, run):
        if run.step != 5 or "SLURM_RESTART_COUNT" in os.environ or "SLURM_JOB_ID" not in os.environ:
            return
        (HERE / f"reached-{run.rank}").touch()
        while not (HERE / "continue").exists():
            time.sleep(0.05)

@hookimpl
def nxdt_callbacks():
    return [Component(name="waits", target="waits:Waits", summary="Waits in a step of a first start.")]
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture
def arguments(tmp_path):
    """Of a run of two ranks, named ``NAME``."""
    (tmp_path / "waits.py").write_text(WAITS)
    keys = [
        "trainer.devices=2",
        f"trainer.max_steps={STEPS}",
        "checkpoint.every_n_train_steps=2",
        "trainer.callbacks=[waits]",
    ]
    keys += [f"plugins.local=[{tmp_path / 'waits.py'}]", f"exp_manager.exp_dir={tmp_path}"]
    return lambda name: ["recipe:llama-tiny", *SMALL, *keys, f"name={name}"]


def losses(metric_rows, run_dir):
    return {step: row["loss"] for step, row in metric_rows(run_dir).items()}


def train_at_once(arguments, tmp_path):
    words = [sys.executable, "-m", "nxdt_core", "train", *arguments("whole")]
    done = processes.run(words, env=environment(PYTHONPATH=str(tmp_path)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def submit(slurm, words, tmp_path):
    command = [sys.executable, "-m", "nxdt_core", "launch", "slurm", *words, "--submit", "--setup"]
    command += [f"export PYTHONPATH={tmp_path} OMP_NUM_THREADS=1"]
    done = processes.run(command, cwd=tmp_path, env=slurm.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def wait_for(paths, slurm, job, deadline_s=400):
    end = time.monotonic() + deadline_s
    while not all(path.exists() for path in paths):
        assert slurm.job(job)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING")
        assert time.monotonic() < end
        time.sleep(0.2)


def test_a_requeued_job_of_two_tasks_resumes_with_the_same_losses(slurm, arguments, tmp_path, metric_rows):
    train_at_once(arguments, tmp_path)
    job = submit(slurm, arguments("parts"), tmp_path)
    wait_for([tmp_path / "reached-0", tmp_path / "reached-1"], slurm, job)
    slurm.call("scontrol", "requeue", job)
    (tmp_path / "continue").touch()
    slurm.wait(job, ("PENDING",))
    slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")
    assert slurm.wait(job, ("COMPLETED", "FAILED")) == "COMPLETED", (tmp_path / "launch/parts/logs").iterdir()
    (log,) = (tmp_path / "launch/parts/logs").glob("*.log")
    text = log.read_text()
    assert f"job {job}, start 1, nodes localhost" in text
    assert f"job {job}, start 2, nodes localhost" in text
    assert f"resuming from {tmp_path}/parts/checkpoints/step-0000000" in text
    assert losses(metric_rows, tmp_path / "parts") == losses(metric_rows, tmp_path / "whole")


def test_a_task_per_node_starts_the_processes_of_its_devices(slurm, arguments, tmp_path, metric_rows):
    (tmp_path / "continue").touch()
    train_at_once(arguments, tmp_path)
    job = submit(slurm, [*arguments("nodes"), "--tasks", "node"], tmp_path)
    assert slurm.wait(job, ("COMPLETED", "FAILED")) == "COMPLETED"
    assert losses(metric_rows, tmp_path / "nodes") == losses(metric_rows, tmp_path / "whole")


def test_a_mistake_is_not_requeued(slurm, arguments, tmp_path):
    job = submit(slurm, [*arguments("mistake"), "data.train_files=[nowhere.txt]"], tmp_path)
    assert slurm.wait(job, ("COMPLETED", "FAILED")) == "FAILED"
    found = slurm.job(job)
    assert (found["ExitCode"], found["Restarts"]) == ("2:0", "0")
