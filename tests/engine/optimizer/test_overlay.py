"""The real command line on four processes, tensor and pipeline parallel: its loss curve lies on that of one process.

The plot is kept as ``nxdt_experiments/overlay/loss.png``.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "nxdt_experiments" / "overlay"
STEPS = 40
"""Those of the recipe."""
FOUR_RANKS = (
    "trainer.devices=4",
    "distributed_strategy.tensor_model_parallel_size=2",
    "distributed_strategy.pipeline_model_parallel_size=2",
)


def rows(run, file):
    return [json.loads(line) for line in (run / file).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run directories of the recipe in one process and in four."""
    where = tmp_path_factory.mktemp("overlay")
    for name, keys in (("one-process", ()), ("tp2-pp2", FOUR_RANKS)):
        command = [sys.executable, "-m", "nxdt_core", "train", "recipe:llama-tiny", f"exp_manager.exp_dir={where}"]
        done = processes.run(
            [*command, f"name={name}", *keys],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return where / "one-process", where / "tp2-pp2"


@pytest.mark.timeout(500)
def test_the_loss_curves_of_one_and_of_four_processes_overlay(runs):
    one, four = (rows(run, "metrics.jsonl") for run in runs)
    assert [row["step"] for row in one] == [row["step"] for row in four] == list(range(1, STEPS + 1))
    # Over 40 steps of AdamW rounding differences grow to 5e-6 at the most.
    assert all(abs(a["loss"] - b["loss"]) < 1e-4 for a, b in zip(one, four, strict=True))
    assert [row["consumed_tokens"] for row in one] == [row["consumed_tokens"] for row in four]
    assert one[-1]["loss"] < 0.6 * one[0]["loss"]


def test_their_validation_losses_agree(runs):
    one, four = (rows(run, "validation.jsonl") for run in runs)
    assert [(row["step"], row["tokens"]) for row in one] == [(row["step"], row["tokens"]) for row in four]
    assert all(abs(a["loss"] - b["loss"]) < 1e-4 for a, b in zip(one, four, strict=True))


def test_the_plot_is_kept(runs):
    command = [sys.executable, "-m", "nxdt_core", "plot", *runs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    KEPT.mkdir(parents=True, exist_ok=True)
    shutil.copy(runs[0] / "loss.png", KEPT)
    assert (KEPT / "loss.png").stat().st_size > 10_000
