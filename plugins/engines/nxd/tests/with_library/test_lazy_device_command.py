"""``nxdt train`` in one process on the device of torch-xla: files, resuming, graphs, and shapes that depend on data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)
COUNTS = """
from nxdt_core.api import Callback, Component, hookimpl

class Counts(Callback):
    def __init__(self, config, run_dir): ...

    def on_step_end(self, run):
        import torch_xla.debug.metrics as metrics
        print("COMPILED", run.step, (metrics.metric_data("CompileTime") or (0,))[0], flush=True)

@hookimpl
def nxdt_callbacks():
    return [Component(name="counts", target=f"{__name__}:Counts")]
"""
"""A plugin that prints how many graphs the process has compiled when a step is done."""
RUN = ("recipe:llama-tiny", "exp_manager.exp_dir=runs", "model.num_layers=2", "data.seq_length=16")
LOSS = re.compile(r"^step (\d+)/\d+ +loss ([\d.]+)", re.MULTILINE)


@pytest.fixture
def nxdt(tmp_path: Path):
    """Run ``nxdt ARGS`` with the engine nxd, off the library's CPU mode."""
    (tmp_path / "counts.py").write_text(COUNTS)

    def run(*words: str, **variables: str):
        return subprocess.run(
            [sys.executable, "-m", "nxdt_core", *words, "parallel_engine.name=nxd"],
            cwd=tmp_path,
            env={**os.environ, "NXD_CPU_MODE": "0", "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1", **variables},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return run


def test_a_run_saves_and_resumes_and_compiles_at_most_three_graphs_in_20_steps(nxdt, tmp_path: Path) -> None:
    horizon, counts = "model.optim.sched.max_steps=24", ("plugins.local=[counts.py]", "trainer.callbacks=[counts]")
    done = nxdt("train", *RUN, "trainer.max_steps=20", horizon, *counts)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = [int(count) for count in re.findall(r"^COMPILED \d+ (\d+)$", done.stdout, re.MULTILINE)]
    assert len(counts) == 20
    assert counts[-1] - counts[0] <= 2, counts  # after the first step, which compiles one
    assert counts[2:] == [counts[2]] * 18, counts
    resumed = nxdt("train", *RUN, "trainer.max_steps=24", horizon)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "resuming from" in resumed.stderr
    losses = [float(loss) for _, loss in LOSS.findall(done.stderr + resumed.stderr)]
    assert len(losses) == 24
    assert losses[20] < losses[0] - 0.5
    verified = subprocess.run(
        [sys.executable, "-m", "nxdt_core", "checkpoint", "verify", "runs/llama-tiny/checkpoints"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert verified.returncode == 0, verified.stderr


def test_a_trial_runs_behind_the_tool_that_collects_graphs(nxdt, tmp_path: Path) -> None:
    tool = tmp_path / "neuron_parallel_compile"
    tool.write_text('#!/bin/sh\nNEURON_EXTRACT_GRAPHS_ONLY=1 exec "$@"\n')
    tool.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = nxdt("compile", *RUN, "compiler_cache_url=graphs", PATH=path)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert lines[-3:] == ["training: traced", "validation: traced", "graphs: 0 new, 0 in the cache before"]
    assert not (tmp_path / "runs").exists()


def test_experts_without_a_capacity_are_refused(nxdt) -> None:
    done = nxdt("train", "recipe:mixtral-tiny", "exp_manager.exp_dir=runs", "trainer.max_steps=2")
    assert done.returncode == 2, done.stderr[-3000:]
    assert "[NXDT-P037]" in done.stderr
    assert "Traceback" not in done.stderr
