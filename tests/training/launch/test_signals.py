"""Ctrl-C and SIGTERM: a real process, a checkpoint at a step boundary, and the run goes on from it."""

import signal
import subprocess
import sys

import pytest

from nxdt_core import checkpoint
from nxdt_core.training import build, train
from tests import processes
from tests.sampling import slow
from tests.training.launch.launching import wait_for_rows


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
