"""A run whose output nobody reads any more (``nxdt train … | head -1``)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import processes
from tests.training.small import SMALL


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_to_its_end_without_a_reader(tmp_path, metric_rows, ranks):
    words = [*SMALL, f"exp_manager.exp_dir={tmp_path}", "name=run", f"trainer.devices={ranks}", "trainer.max_steps=6"]
    process = processes.Popen(
        [sys.executable, "-m", "nxdt_core", "train", "recipe:llama-tiny", *words, "trainer.log_every_n_steps=1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    while not lines or "loss" not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    process.stdout.close()
    assert process.wait(240) == 0
    assert max(metric_rows(tmp_path / "run")) == 6
    log = next((tmp_path / "run" / "logs").glob("globalrank-0*")).read_text()
    assert "step 6/6" in log
    assert "BrokenPipe" not in log
