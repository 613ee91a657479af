"""A run whose output nobody reads any more (``nxdt train … | head -1``)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import processes
from tests.sampling import slow
from tests.train.small import SMALL


@pytest.mark.parametrize("ranks", [1, slow(2)])
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


@pytest.mark.parametrize(
    "words", [("recipes", "list"), slow(("recipes", "show", "llama-tiny")), slow(("plugins", "list"))]
)
def test_a_full_disk_behind_the_output_is_one_line(words):
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "nxdt_core", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "The output is incomplete: No space left on device\n")


@pytest.mark.parametrize("closed", [slow(">&-"), slow("2>&-"), ">&- 2>&-"])
def test_a_command_works_without_output(tmp_path, closed):
    words = f"{sys.executable} -m nxdt_core config check recipe:llama-tiny {closed}"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
