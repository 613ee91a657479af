"""The time of compiling is said apart from the steps'."""

from __future__ import annotations

import io
import json

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers.logger import DummyLogger

from nxdt_core.parallel.compile.layers import compile_layers
from nxdt_core.progress import PROGRESS
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.training import NxdtDataModule, NxdtModule, NxdtStrategy
from nxdt_core.training.callbacks.compile_time import CompileTime
from nxdt_core.training.callbacks.console import Console


class Keeper(DummyLogger):
    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))


class CompileFirst(pl.Callback):
    """Compiles the layers before the first step, as an engine does."""

    def on_train_start(self, trainer, pl_module):
        for module in pl_module.model.local_modules():
            compile_layers(module, ParallelPlan(), backend="eager")


def fit(config, *callbacks):
    logger = Keeper()
    trainer = pl.Trainer(
        strategy=NxdtStrategy(config),
        accelerator="cpu",
        devices=1,
        max_steps=3,
        max_epochs=-1,
        callbacks=list(callbacks),
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
    )
    trainer.fit(NxdtModule(config), NxdtDataModule(config))
    return [row for row in logger.rows if "perf/compile_time_s" in row[1]]


def test_the_first_step_says_what_it_compiled(small_run):
    torch._dynamo.reset()
    stream = io.StringIO()
    PROGRESS.begin_start(0)
    rows = fit(small_run(), CompileFirst(), CompileTime(Console(3, stream=stream)))
    assert 0 < PROGRESS.take_start()["compile"] == rows[0][1]["perf/compile_time_s"]
    lines = stream.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 1"]
    assert lines[0].startswith("step 1: compiling took ")
    assert [step for step, _ in rows] == [1]
    assert rows[0][1]["perf/compile_time_s"] > 0
    json.dumps(rows)


def test_a_run_that_compiles_nothing_says_nothing(small_run):
    stream = io.StringIO()
    assert fit(small_run(), CompileTime(Console(3, stream=stream))) == []
    assert stream.getvalue() == ""
