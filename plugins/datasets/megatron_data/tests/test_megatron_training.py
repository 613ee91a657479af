"""A GPT trained on files of ``nxdt data preprocess``, killed in the middle of a pass, goes on over other ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import pytest
from nxdt_testing.ranks import RankPool

from nxdt_core import checkpoint
from nxdt_core.cli import main
from nxdt_core.config import load
from nxdt_core.run import train
from nxdt_core.train import build
from tests import processes

RECIPE = "recipe:gpt-indexed-tiny"
SMALL = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "data.seq_length=32",
    "data.global_batch_size=8",
    "data.splits_string='1,0,0'",
    "trainer.accelerator=cpu",
    "trainer.val_check_interval=null",
    "name=run",
)
NXDT = (sys.executable, "-m", "nxdt_core")
ENVIRONMENT = {**os.environ}


def losses(directory):
    """By step; where a step stands twice, the last counts."""
    lines = (directory / "run/metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines)}


def step_of(directory):
    """The newest step that a run tells of."""
    metrics = directory / "run/metrics.jsonl"
    return max(losses(directory), default=0) if metrics.exists() and metrics.read_text().endswith("\n") else 0


def trained_on_rank(overrides):
    train(load(RECIPE, overrides))


@pytest.fixture
def blend(tmp_path, tokenise_here):
    """Two sets, of 15 and 30 samples: the smaller of them comes twice in a pass."""
    for name, documents in (("low", 60), ("high", 120)):
        lines = [json.dumps({"text": f"{name} {number} said so"}) for number in range(documents)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        words = ("--input", str(tmp_path / f"{name}.jsonl"), "--output-prefix", str(tmp_path / name))
        with pytest.MonkeyPatch.context() as patch:
            tokenise_here(patch)
            assert main(["data", "preprocess", *words, "--tokenizer", "byte", "--workers", "1"]) == 0
    return f"data.data_prefix=[0.5, {tmp_path / 'low'}, 0.5, {tmp_path / 'high'}]"


def test_a_run_that_is_killed_goes_on_over_two_ranks_with_the_same_samples(blend, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    words = ("train", RECIPE, *SMALL, blend, f"exp_manager.exp_dir={killed}", "checkpoint.every_n_train_steps=5")
    with processes.Popen([*NXDT, *words, "trainer.max_steps=100000"], env=ENVIRONMENT, start_new_session=True) as run:
        end = time.monotonic() + 240
        while step_of(killed) < 12 and time.monotonic() < end and run.poll() is None:
            time.sleep(0.02)
        assert run.poll() is None, "it ended by itself"
        os.killpg(run.pid, signal.SIGKILL)
    config = load(RECIPE, [*SMALL, blend, f"exp_manager.exp_dir={killed}"])
    reached = checkpoint.latest(build.storage(config), warn=print).step
    steps = reached + 9
    RankPool(2).run(trained_on_rank, [*words[2:], f"trainer.max_steps={steps}", "trainer.devices=2"], timeout_s=240)
    train(load(RECIPE, [*SMALL, blend, f"exp_manager.exp_dir={whole}", f"trainer.max_steps={steps}"]))
    once, twice = losses(whole), losses(killed)
    assert [twice[step] for step in range(1, steps + 1)] == pytest.approx([once[k] for k in range(1, steps + 1)], 1e-5)
    assert len(set(once.values())) == steps
