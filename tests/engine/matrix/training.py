"""What each rank of a layout does: train the way users do, and report what it computed and what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nxdt_core.config import ResolvedConfig, load
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.parallel_model import ParallelModel, ParallelOptimizer
from nxdt_core.train import build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_model, initialize_parallel_optimizer, train_step
from tests.at_rest import at_rest
from tests.engine.matrix.batches import ROWS, SEQ, VOCAB, global_batch, share
from tests.engine.matrix.layouts import Layout, Numbers
from tests.engine.matrix.measured import (
    Measured,
    gradient_bytes,
    live_bytes,
    optimizer_bytes,
    watched,
    weight_bytes,
)

STEPS = 20
MAX_NORM = 1.0
"""Among the norms that occur, so that some steps are clipped."""

_LLAMA = {
    "name": "llama",
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 40,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": SEQ,
    "init_method_std": 0.1,
}
_EXPERTS = {"name": "moe-test", "num_layers": 2, "moe": {"num_experts": 4, "shared_ffn_hidden_size": 16}}
_OPTIMIZER = {
    "float64": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.1},
    "fp32": {"name": "sgd", "lr": 0.3},
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """One rank's account; tensors are whole, as one process has them."""

    rank: int
    losses: list[float]
    norms: list[float]
    weight_norms: list[float]
    figures: dict[str, list[float]]
    """Further metrics of every step by name."""
    gradients: dict[str, torch.Tensor]
    """Of the first step, which does not clip."""
    weights: dict[str, torch.Tensor]
    """After the last step."""
    tied_copies: dict[str, torch.Tensor]
    """Each copy of a tied parameter on this rank by the name that it has there, after the last step."""
    held: Measured


def configuration(
    layout: Layout,
    numbers: Numbers,
    model: Mapping[str, Any] | None = None,
    adapter: Mapping[str, Any] | None = None,
) -> ResolvedConfig:
    """The matrix's run in ``layout``; ``model`` is another architecture than the matrix's."""
    run = {
        "name": "matrix",
        "plugins": {"local": [str(Path(__file__).with_name("components.py"))]},
        "trainer": {"max_steps": STEPS, "accelerator": "cpu"},
        "data": {
            "name": "text",
            "train_files": ["package://nxdt_plugin_text/data/kjv.txt"],  # never read: the batch is our own
            "tokenizer": {"library": "byte"},
            "seq_length": SEQ,
            "micro_batch_size": ROWS,
            "global_batch_size": ROWS * layout.micro_batches,
        },
        "model": {
            **(model or own_model(layout)),
            "optim": {**_OPTIMIZER[numbers], "sched": {"name": "constant"}},
        },
        "precision": {"type": numbers},
        "adapter": adapter or {},
    }
    return load(run, layout.overrides())


def own_model(layout: Layout, layers: int = 4) -> Mapping[str, Any]:
    """The matrix's model; that with experts has two layers."""
    if layout.moe:
        return _EXPERTS
    return {**_LLAMA, "num_layers": layers, "share_embeddings_and_output_weights": layout.tied}


def train(
    layout: Layout,
    numbers: Numbers,
    steps: int = STEPS,
    model: Mapping[str, Any] | None = None,
    adapter: Mapping[str, Any] | None = None,
) -> Report:
    """Train ``layout`` on this rank. A function of a pool of ``layout.world`` ranks."""
    config = configuration(layout, numbers, model, adapter)
    engine = build.engine(config)
    engine.start()
    before = live_bytes()
    model = initialize_parallel_model(config, engine)
    for each in build.adapters(config):
        each.begin(model, config, engine.ranks)
    optimizer = initialize_parallel_optimizer(config, engine, model)
    place = engine.rank_info
    batches = share(global_batch(packed=layout.packed, count=layout.micro_batches), place.dp_rank, place.dp_size)
    run = _Run(config, model, optimizer, batches)
    gradients, sizes = run.first_step()
    with watched(model.local_modules()) as activations:
        run.step()
    for _ in range(steps - 2):
        run.step()
    live = at_rest(live_bytes) - before - sum(gradient.nbytes for gradient in gradients.values())
    report = Report(
        rank=place.rank,
        losses=run.losses,
        norms=run.norms,
        weight_norms=run.weight_norms,
        figures=run.figures,
        gradients=gradients,
        weights={name: whole(parameter) for name, parameter in model.named_parameters()},
        tied_copies=_tied_copies(model, build.model_builder(config).plan().tied),
        held=Measured(
            weights=weight_bytes(model.named_parameters()),
            gradients=sizes,
            optimizer=optimizer_bytes(optimizer.inner),
            live=live,
            activations=activations,
        ),
    )
    engine.shutdown()
    return report


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a parameter or gradient, on every rank that holds a part of it. Collective."""
    value = tensor.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


class _Run:
    """A user's loop over one repeated batch."""

    def __init__(
        self, config: ResolvedConfig, model: ParallelModel, optimizer: ParallelOptimizer, batches: list[Batch]
    ) -> None:
        self._model, self._optimizer, self._batches = model, optimizer, batches
        self._objective, self._schedule = build.objective(config), build.schedule(config)
        self._state = TrainState()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.weight_norms: list[float] = []
        self.figures: dict[str, list[float]] = {}

    def step(self, max_norm: float | None = MAX_NORM, apply: Callable[[], object] | None = None) -> None:
        result = train_step(
            self._model,
            self._optimizer,
            self._batches,
            self._objective,
            self._schedule,
            self._state,
            max_norm=max_norm,
            apply=apply,
        )
        self.losses.append(float(result.loss.loss))
        self.norms.append(float(result.grad_norm))
        self.weight_norms.append(float(self._model.parameter_norm()))
        for name, value in result.loss.metrics.items():
            self.figures.setdefault(name, []).append(float(value))

    def first_step(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Without clipping; returns the gradients, and the bytes of those held."""
        gradients: dict[str, torch.Tensor] = {}
        sizes: dict[str, int] = {}

        def look_and_apply() -> None:
            sizes.update(gradient_bytes(self._model.named_parameters()))
            for name, parameter in self._model.named_parameters():
                if parameter.grad is not None:
                    gradients[name] = whole(parameter.grad)
            self._optimizer.step()

        self.step(None, look_and_apply)
        return gradients, sizes


def _tied_copies(model: ParallelModel, tied: Sequence[tuple[str, str]]) -> dict[str, torch.Tensor]:
    names = {name for pair in tied for name in pair}
    return {
        name: whole(parameter)
        for module in model.local_modules()
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if name in names
    }
