"""What each rank does in the tests of optimizers over shards: train, save, go on, and go on from what was saved."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from nxdt_core import checkpoint
from nxdt_core.builtins import nxdt_optimizers
from nxdt_core.config import load
from nxdt_core.distributed.placement import local_of
from nxdt_core.errors import NxdtError
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.optimizer import as_torch
from nxdt_core.train import TrainSession, build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step
from tests.engine.matrix.training import whole

ROWS, SEQ, STEPS, MORE = 4, 16, 2, 1
RATES = {"sgd": 0.3, "adadelta": 1.0, "adagrad": 0.03, "lion": 1e-3, "rprop": 1e-3}
"""Where 0.01 suits badly."""
FURTHER = {
    "sgd": {"momentum": 0.9},
    "rmsprop": {"momentum": 0.5, "centered": True},
    "novograd": {"grad_averaging": True},
}
"""Keys that give an optimizer all the state that it can have."""
NAMES = tuple(record.name for record in nxdt_optimizers())

STRATEGY = "distributed_strategy."
TP2 = f"{STRATEGY}tensor_model_parallel_size=2"
EVEN = ("model.num_attention_heads=4", "model.num_kv_heads=2")
VOCAB = 272
LLAMA = {
    "name": "llama",
    "num_layers": 2,
    "hidden_size": 24,
    "head_dim": 8,
    "num_attention_heads": 3,
    "num_kv_heads": 3,
    "ffn_hidden_size": 50,  # cut in two, and that in two again, unevenly
    "vocab_size": VOCAB,
    "max_position_embeddings": SEQ,
    "init_method_std": 0.1,
}
EXPERTS = {
    "name": "moe-test",
    "num_layers": 1,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "vocab_size": VOCAB,
    "moe": {"num_experts": 4},
}


def configuration(name: str, directory: Path, overrides: tuple[str, ...], experts: bool = False):
    """The run of one optimizer, in float64."""
    return load(_run(name, directory, experts), overrides, kernel=_kernel())


@cache
def _kernel():
    """One for all configurations of a process, since each would have to be started and to import the plugin file."""
    return load(_run("sgd", Path(), False)).kernel


def _run(name: str, directory: Path, experts: bool) -> dict[str, Any]:
    optim = {"name": name, "lr": RATES.get(name, 1e-2), "weight_decay": 0.0 if name == "rprop" else 0.1}
    return {
        "name": name,
        "plugins": {"local": [str(Path(__file__).parents[1] / "matrix" / "components.py")]},
        "trainer": {"max_steps": STEPS + MORE, "accelerator": "cpu"},
        "exp_manager": {"exp_dir": str(directory)},
        "data": {
            "name": "text",
            "train_files": ["package://nxdt_plugin_text/data/kjv.txt"],  # never read: the batch is our own
            "tokenizer": {"library": "byte"},
            "seq_length": SEQ,
            "micro_batch_size": 1,
            "global_batch_size": ROWS,
        },
        "model": {**(EXPERTS if experts else LLAMA), "optim": {**optim, **FURTHER.get(name, {})}},
        "precision": {"type": "float64"},
    }


def train(directory: Path, overrides: tuple[str, ...], names: tuple[str, ...], experts: bool, resumes: bool):
    """By optimizer: losses of all steps, and where it ``resumes`` whether the checkpoint led to the same bits."""
    engine = build.engine(configuration(names[0], directory, overrides, experts))
    engine.start()
    found = {}
    for name in names:
        config = configuration(name, directory, overrides, experts)
        run = Run(config, engine)
        losses = run.steps(STEPS)
        TrainSession(config, engine=engine, model=run.model, optimizer=run.optimizer, state=run.state).save(
            build.storage(config)
        )
        losses += run.steps(MORE)
        found[name] = losses, resumes and _goes_on_as(run)
    engine.shutdown()
    return found


def clipped(directory: Path, overrides: tuple[str, ...]):
    """Losses of float32 steps that are clipped, and the state of this rank's parameters, whole."""
    config = configuration("adamw", directory, ("precision.type=fp32", *EVEN, *overrides))
    engine = build.engine(config)
    engine.start()
    run = Run(config, engine, max_norm=0.1)
    losses = run.steps(STEPS + MORE)
    state = {key: value for key, value in run.optimizer.state_dict().items() if not key.endswith("/step")}
    found = {key: whole(value) for key, value in state.items()}
    engine.shutdown()
    return losses, found


def _goes_on_as(run: Run) -> bool:
    """Return whether a run that loads the checkpoint of ``run`` and takes the steps after it has the same bits."""
    again = Run(run.config, run.engine)
    again.load()
    again.steps(MORE)
    return run.same_as(again)


class Run:
    """A model and an optimizer on one repeated batch."""

    def __init__(self, config, engine, max_norm: float = 1.0) -> None:
        self.config, self.engine, self.state, self.max_norm = config, engine, TrainState(), max_norm
        self.model = initialize_parallel_model(config, engine)
        self.optimizer = initialize_parallel_optimizer(config, engine, self.model)
        self.ids = ids = torch.randint(VOCAB, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(5))
        place = engine.rank_info
        rows = [row for row in range(ROWS) if row * place.dp_size // ROWS == place.dp_rank]
        self.batches = [Batch(input_ids=ids[row : row + 1, :-1], labels=ids[row : row + 1, 1:]) for row in rows]
        self.objective, self.schedule = build.objective(config), build.schedule(config)

    def steps(self, count: int) -> list[float]:
        return [float(self._step()) for _ in range(count)]

    def load(self) -> None:
        store = build.storage(self.config)
        TrainSession(
            self.config, engine=self.engine, model=self.model, optimizer=self.optimizer, state=self.state
        ).load_checkpoint(store, checkpoint.latest(store, warn=print))

    def same_as(self, other: Run) -> bool:
        pairs = zip(self.model.named_parameters(), other.model.named_parameters(), strict=True)
        return all(torch.equal(local_of(mine), local_of(theirs)) for (_, mine), (_, theirs) in pairs)

    def _step(self) -> torch.Tensor:
        return train_step(
            self.model, self.optimizer, self.batches, self.objective, self.schedule, self.state, max_norm=self.max_norm
        ).loss.loss


def saved(directory: Path, name: str, experts: bool) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of a checkpoint, whole."""
    store = build.storage(configuration(name, directory, (), experts))
    manifest = checkpoint.latest(store, warn=print)
    state = {f"state/{key}": value for key, value in checkpoint.load_optimizer(store, manifest).items()}
    return {**checkpoint.load_model(store, manifest), **state}


class Rows(torch.optim.Optimizer):
    """Keeps one number for each row of the local weight: right in each step, also on shards of rows."""

    def __init__(self, groups, section) -> None:
        super().__init__(as_torch(groups), {"lr": section.lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                square = weight.grad.square()
                square = square if weight.dim() < 2 else square.mean(-1)
                mean = self.state[weight].setdefault("rows", torch.zeros_like(square)).mul_(0.9).add_(square)
                size = mean.sqrt() + 1e-6
                weight.sub_(weight.grad / (size if weight.dim() < 2 else size[..., None]), alpha=1e-3)


def train_rows(directory: Path, overrides: tuple[str, ...], resumes: bool) -> str | None:
    """Train with :class:`Rows`, and save, after a resume where that is said; return the message of an error."""
    config = configuration("sgd", directory, overrides)
    engine = build.engine(config)
    engine.start()
    run = Run(config, engine)
    run.optimizer = engine.initialize_optimizer(run.model, Rows, config.selected("optimizer").config, decay_norms=False)
    try:
        if resumes:
            run.load()
        run.steps(1)
        parts = {"model": run.model, "optimizer": run.optimizer, "state": run.state}
        TrainSession(config, engine=engine, **parts).save(build.storage(config))
    except NxdtError as error:
        return str(error)
    finally:
        engine.shutdown()
    return None
