"""The real command line on four processes, two for the experts and two for each tensor: its loss curve lies on that of
one process."""

from __future__ import annotations

import json
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import processes

FIGURES = ("expert_load_max", "expert_load_layer_max", "expert_load_min", "dropped_tokens", "router_entropy")
STEPS = 10
FOUR_RANKS = (
    "trainer.devices=4",
    "distributed_strategy.expert_model_parallel_size=2",
    "distributed_strategy.tensor_model_parallel_size=2",
)


def train(where, name, *keys):
    """The metrics of the recipe's first steps."""
    run = [sys.executable, "-m", "nxdt_core", "train", "recipe:mixtral-tiny", f"exp_manager.exp_dir={where}"]
    short = (f"name={name}", f"trainer.max_steps={STEPS}", f"model.optim.sched.max_steps={STEPS}")
    done = processes.run(
        [*run, *short, "data.global_batch_size=8", "checkpoint.enabled=false", *keys],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (where / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def logged(directory):
    """Names of what the event files of a run hold."""
    events = EventAccumulator(str(directory)).Reload()
    return events.Tags()["scalars"]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_loss_curves_of_one_and_of_four_processes_overlay(tmp_path):
    one, four = train(tmp_path, "one"), train(tmp_path, "ep2-tp2", *FOUR_RANKS)
    assert [row["step"] for row in one] == [row["step"] for row in four] == list(range(1, STEPS + 1))
    assert all(abs(a["loss"] - b["loss"]) < 1e-4 for a, b in zip(one, four, strict=True))
    assert all(abs(a["grad_norm"] - b["grad_norm"]) < 1e-3 for a, b in zip(one, four, strict=True))
    assert one[-1]["loss"] < 0.9 * one[0]["loss"]
    for figure in FIGURES:
        assert [row[figure] for row in four] == pytest.approx([row[figure] for row in one], rel=1e-3), figure
        assert f"train/{figure}" in logged(tmp_path / "ep2-tp2"), figure
    assert all(row["expert_load_min"] <= 1 <= row["expert_load_max"] for row in one)
