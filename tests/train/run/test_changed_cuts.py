"""A run that was cut evenly resumes where cuts are chosen, with the losses that it would have had."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.train.small import SMALL

EVEN = "model.pipeline_cuts=[layers.1]"
HALF, WHOLE = 2, 4


def train(where: Path, steps: int, *more: str) -> dict[int, float]:
    """Losses by step of two pipeline ranks, whose head costs more than their layers."""
    done = processes.run(
        [
            *(sys.executable, "-m", "nxdt_core", "train", "recipe:llama-tiny", *SMALL),
            *("model.num_layers=4", "model.num_attention_heads=4", "model.vocab_size=2048"),
            *("trainer.devices=2", "distributed_strategy.pipeline_model_parallel_size=2", "name=run"),
            *(f"exp_manager.exp_dir={where}", f"trainer.max_steps={steps}", "checkpoint.resume_if_exists=true", *more),
        ],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (where / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines)}


@pytest.mark.timeout(300)
def test_a_run_cut_evenly_resumes_under_chosen_cuts(tmp_path: Path) -> None:
    even, chosen = tmp_path / "even", tmp_path / "chosen"
    train(even, HALF, EVEN)
    shutil.copytree(even, chosen)
    expected = train(even, WHOLE, EVEN)
    resumed = train(chosen, WHOLE)
    assert sorted(resumed) == sorted(expected) == list(range(1, WHOLE + 1))
    assert resumed == pytest.approx(expected, abs=1e-5)
    assert expected[WHOLE] < expected[HALF] < expected[1]
