"""A job that Slurm requeues: SIGTERM to every process, and the same command again, as the same job."""

from __future__ import annotations

import os
import signal
import time

from tests.launch.launching import finish, ranks_of, start, words
from tests.sampling import sampled

WAITS = """
import os, time
from pathlib import Path
from nxdt_core.api import Callback, Component, hookimpl

HERE = Path(__file__).parent

class Waits(Callback):
    def __init__(self, config, run_dir): ...

    def on_step_end(self, run):
        if run.step != 4 or os.environ["SLURM_RESTART_COUNT"] != "0" or "once" in str(HERE):
            return
        (HERE / f"reached-{run.rank}").touch()
        while not (HERE / "signalled").exists():
            time.sleep(0.01)

@hookimpl
def nxdt_callbacks():
    return [Component(name="waits", target="waits:Waits", summary="Waits in a step for a signal.")]
"""
STEPS = 7


def pytest_generate_tests(metafunc):
    if "devices" in metafunc.fixturenames:
        metafunc.parametrize("devices", [1, *sampled(metafunc.config, [2], 0)])


def begin(directory, devices, restarts):
    directory.mkdir(exist_ok=True)
    (directory / "waits.py").write_text(WAITS)
    more = ("checkpoint.enabled=true", f"trainer.devices={devices}", f"trainer.max_steps={STEPS}")
    resume = ("checkpoint.resume_if_exists=true", "checkpoint.resume_ignore_no_checkpoint=true", "name=run")
    plugin = (f"plugins.local=[{directory / 'waits.py'}]", "trainer.callbacks=[waits]")
    job = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": str(restarts), "PYTHONPATH": str(directory)}
    return start(words(directory, *more, *resume, *plugin), **job)


def test_a_requeued_job_continues_with_the_losses_of_one_that_was_not(tmp_path, metric_rows, devices):
    whole, parts = tmp_path / "at-once", tmp_path / "parts"
    status, _, err = finish(begin(whole, devices, 0))
    assert status == 0, err
    process = begin(parts, devices, 0)
    end = time.monotonic() + 120
    while len([*parts.glob("reached-*")]) < devices and time.monotonic() < end and process.poll() is None:
        time.sleep(0.02)
    for pid in (process.pid, *(ranks_of(process) if devices > 1 else ())):
        os.kill(pid, signal.SIGTERM)
    (parts / "signalled").touch()
    status, _, err = finish(process)
    assert status == 128 + signal.SIGTERM, err
    assert "Traceback" not in err
    reached = max(metric_rows(parts / "run"))
    assert 4 <= reached < STEPS
    status, out, err = finish(begin(parts, devices, 1))
    assert status == 0, out + err
    assert f"resuming from {parts}/run/checkpoints/step-{reached:08d}" in out + err
    assert "waiting" not in out + err
    once, twice = metric_rows(whole / "run"), metric_rows(parts / "run")
    assert [twice[step]["loss"] for step in range(1, STEPS + 1)] == [once[step]["loss"] for step in range(1, STEPS + 1)]
    assert [twice[step]["grad_norm"] for step in sorted(twice)] == [once[step]["grad_norm"] for step in sorted(once)]
