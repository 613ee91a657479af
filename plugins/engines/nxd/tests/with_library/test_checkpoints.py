"""A checkpoint of either engine resumes under the other, through ``nxdt train``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.numpy

pytestmark = pytest.mark.timeout(1800)
TORCH: tuple[str, ...] = ("parallel_engine.name=torch",)
NXD = ("parallel_engine.name=nxd", "trainer.devices=2")
TP2 = (*NXD, "distributed_strategy.tensor_model_parallel_size=2", "distributed_strategy.sequence_parallel=true")
PP2 = (*NXD, "distributed_strategy.pipeline_model_parallel_size=2")
TIED = "model.share_embeddings_and_output_weights=true"
ROUTES = {
    "torch, nxd TP2, torch": (TORCH, TP2, TORCH),
    "nxd TP2, torch, nxd PP2": (TP2, TORCH, PP2),
}


def nxdt(*arguments: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nxdt_core", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def train(folder: Path, steps: int, *overrides: str) -> None:
    run = ("recipe:llama-tiny", f"trainer.max_steps={steps}", "trainer.limit_val_batches=0", TIED)
    lengths = ("data.seq_length=32", "model.optim.sched.max_steps=40", "data.micro_batch_size=4")
    nxdt("train", *run, *lengths, f"exp_manager.exp_dir={folder}", *overrides, folder=folder)


def losses(folder: Path) -> list[float]:
    (log,) = folder.glob("llama-tiny/**/metrics.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def export(folder: Path) -> Path:
    """Return the file of weights of the last checkpoint."""
    nxdt("checkpoint", "export", str(folder / "llama-tiny" / "checkpoints"), str(folder / "hf"), folder=folder)
    return folder / "hf" / "model.safetensors"


@pytest.mark.parametrize("route", ROUTES)
def test_a_run_that_changes_its_engine_goes_on_as_one_that_does_not(route: str, tmp_path: Path) -> None:
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    whole.mkdir()
    changed.mkdir()
    train(whole, 6, *TORCH)
    for steps, engine in zip((2, 4, 6), ROUTES[route], strict=True):
        train(changed, steps, *engine)
    assert losses(changed) == pytest.approx(losses(whole), abs=1e-6)
    for folder in (whole, changed):
        nxdt("checkpoint", "verify", str(folder / "llama-tiny" / "checkpoints"), folder=folder)
    ours, theirs = (safetensors.numpy.load_file(export(folder)) for folder in (changed, whole))
    assert ours.keys() == theirs.keys()
    assert max(abs(ours[name] - theirs[name]).max() for name in ours) < 1e-5
