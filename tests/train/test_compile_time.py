"""The time of compiling is said apart from the steps'."""

from __future__ import annotations

import time

import torch

from nxdt_core.callback import Callback, Run
from nxdt_core.engine.compile import compile_layers
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.run.callbacks.profiler import CompileTime
from nxdt_core.system.progress import PROGRESS
from nxdt_core.train import TrainSession
from nxdt_core.train.loop import fit


class CompileFirst(Callback):
    """Compiles the layers before the first step, as an engine does."""

    def on_fit_start(self, run):
        for module in run.session.model.local_modules():
            compile_layers(module, ParallelPlan(), backend="eager")


class Keeper(Callback):
    def __init__(self):
        self.rows = []

    def on_log(self, run, metrics):
        self.rows.append((run.step, metrics["perf/compile_time_s"]))


def fitted(config, **callbacks):
    """What a run says and logs."""
    said, keeper = [], Keeper()
    with TrainSession(config) as session:
        run = Run(session, said.append, {**callbacks, "keeper": keeper})
        fit(run)
        run.call("close")
    return said, keeper.rows


def test_the_first_step_says_what_it_compiled(small_run):
    torch._dynamo.reset()
    PROGRESS.counted_at = time.monotonic()
    said, rows = fitted(small_run("trainer.max_steps=3"), first=CompileFirst(), clock=CompileTime())
    ((step, seconds),) = rows
    assert 0 < PROGRESS.take_start()["compile"] == seconds
    assert step == 1
    assert [line.partition(":")[0] for line in said] == ["step 1"]
    assert said[0].startswith("step 1: compiling took ")


def test_a_run_that_compiles_nothing_says_nothing(small_run):
    assert fitted(small_run("trainer.max_steps=3"), clock=CompileTime()) == ([], [])
