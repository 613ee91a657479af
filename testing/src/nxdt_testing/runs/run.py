"""A small model and its optimizer in an engine: what all contracts that train build, in one process or on a rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from nxdt_core.config import ResolvedConfig, load
from nxdt_core.distributed.devices import HOST
from nxdt_core.distributed.placement import local_shard_of
from nxdt_core.engine.weights import reset_buffers
from nxdt_core.models.loss import CausalLM
from nxdt_core.models.random.init import complete_init_rules, initialize
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.objective import Objective
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.train import build
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_optimizer, train_step
from nxdt_testing.contract import copied
from nxdt_testing.runs.moe import MoEBuilder
from nxdt_testing.runs.moe_config import MoEConfig, MoEModelConfig

__all__ = [
    "EXACT",
    "Parts",
    "Run",
    "built",
    "differing",
    "elements",
    "fresh",
    "global_batch",
    "run_config",
    "small_decoder",
]

SEED, LENGTH = 11, 16
_MICRO_BATCHES = 4
_NUMBERS: Any = dict.fromkeys(("parameters", "gradients", "optimizer_state"), "float64")
EXACT = PrecisionPolicy(name="float64", **_NUMBERS)
"""A policy under which what differs is a mistake, and never rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The target of a component, importable so that ranks can unpickle it, and its section."""

    factory: Callable[..., Any]
    section: Any


def run_config(
    *overrides: str, name: str = "contract", plugins: Sequence[str] = (), **sections: Mapping[str, Any]
) -> ResolvedConfig:
    """Return a run of a small model that declares every capability.

    Args:
        overrides: as of ``nxdt train``.
        name: of the run.
        plugins: files, for ``plugins.local``.
        sections: keys in addition to those of each section.
    """
    run: dict[str, Any] = {
        "plugins": {"local": [str(Path(__file__).with_name("plugin.py")), *plugins]},
        "trainer": {"max_steps": 4, "accelerator": HOST.type},
        "data": {
            "name": "none",
            "seq_length": LENGTH,
            "global_batch_size": _MICRO_BATCHES,
            "micro_batch_size": 1,
        },
        "model": {
            "name": "engine-contract",
            "num_layers": 4,
            "optim": {"name": "sgd", "lr": 0.5, "sched": {"name": "constant"}},
        },
        "precision": {"type": "fp32"},
    }
    merged = {section: {**run.get(section, {}), **keys} for section, keys in sections.items()}
    return load({"name": name, "seed": 7, **run, **merged}, overrides)


def small_decoder() -> MoEBuilder:
    """Return the builder of a decoder with one expert, which has no choice that rounding could change."""
    only = MoEConfig(num_experts=1, top_k=1, router_aux_loss_coef=0.0, router_z_loss_coef=0.0)
    return MoEBuilder(MoEModelConfig(moe=only))


def built(builder: ModelBuilder) -> nn.Module:
    """Return the whole model on the host, with the buffers that ``reset_buffers`` computes, as an engine builds it."""
    module = builder.build()
    reset_buffers(module)
    return module


def fresh(builder: ModelBuilder, seed: int = SEED, dtype: torch.dtype | None = None) -> nn.Module:
    """Return the whole model with its first weights."""
    module = built(builder)
    if dtype is not None:
        module.to(dtype)
    initialize(module.named_parameters(), complete_init_rules(builder, dict(module.named_parameters())), seed)
    return module


def global_batch(vocabulary: int, length: int = LENGTH, *, micro: int = 1, documents: bool = False) -> list[Batch]:
    """Return micro-batches of ``micro`` rows with different numbers of loss tokens; ``documents``: two in each row,
    which end at different places."""
    rows, draws = _MICRO_BATCHES * micro, torch.Generator().manual_seed(SEED)
    ids = torch.randint(vocabulary, (rows, length + 1), generator=draws)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=draws) < torch.linspace(0, 0.8, rows)[:, None]] = IGNORE_INDEX
    batch = Batch(input_ids=ids[:, :-1], labels=labels)
    if documents:
        ends = (3 + 2 * torch.arange(rows)[:, None]).clamp(max=length - 1)
        numbers = (torch.arange(length) >= ends).long()
        batch = replace(batch, document_ids=numbers, position_ids=torch.arange(length) - numbers * ends)
    return [_rows(batch, row, micro) for row in range(0, rows, micro)]


def _rows(batch: Batch, first: int, count: int) -> Batch:
    return batch.map(lambda tensor: tensor[first : first + count])


def elements(value: Any, name: str = "a tensor") -> torch.Tensor:
    """Return this rank's elements of a tensor or piece, on the host."""
    return local_shard_of(value, name).tensor.detach().to(HOST)


def differing(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return the names of two states whose tensors are not bitwise equal, or that only one of them has."""
    both = actual.keys() & expected.keys()
    names = [*expected, *(name for name in actual if name not in both)]
    return [n for n in names if n not in both or not torch.equal(elements(actual[n]), elements(expected[n]))]


class Run:
    """A model and its optimizer in an engine, and what its steps gave; a context that ends the engine.

    Args:
        config: see :func:`run_config`.
        builder: of another model than the configuration's.
        policy: another precision than the configuration's.
        seed: of the first weights.
        adapters: others than the configuration's.
        optimizer: another one than the configuration's.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        *,
        builder: ModelBuilder | None = None,
        policy: PrecisionPolicy | None = None,
        seed: int = SEED,
        adapters: Sequence[Adapter] | None = None,
        optimizer: Parts | None = None,
    ) -> None:
        self.config = config
        self.engine = build.engine(config)
        adapters_of_run = build.adapters(config) if adapters is None else adapters
        with ExitStack() as unless_built:  # an error of what is tested leaves no process group to later tests
            unless_built.callback(self._give_up)
            self.engine.start()
            builder, policy = builder or build.model_builder(config), policy or build.precision(config)
            self.model = self.engine.initialize_model(builder, precision=policy, seed=seed, adapters=adapters_of_run)
            for adapter in adapters_of_run:
                adapter.begin(self.model, config, self.engine.ranks)
            if optimizer is None:
                self.optimizer = initialize_parallel_optimizer(config, self.engine, self.model)
            else:
                factory, section = optimizer.factory, optimizer.section
                self.optimizer = self.engine.initialize_optimizer(self.model, factory, section, decay_norms=False)
            unless_built.pop_all()
        self.state = TrainState()
        self.losses: list[float] = []
        self.norms: list[float] = []
        """Norms of gradients, before clipping."""
        self.weight_norms: list[float] = []
        self.metrics: list[dict[str, float]] = []
        self._before = self.weights()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.engine.shutdown()
        else:
            self._give_up()

    def _give_up(self) -> None:
        """End the engine of a single process: a rank leaves that to its pool, which names the first rank to fail."""
        if os.environ.get("WORLD_SIZE", "1") == "1":
            self.engine.shutdown()

    def steps(
        self,
        batches: Sequence[Batch],
        count: int,
        *,
        objective: Objective | None = None,
        factor: Callable[[int], float] = lambda step: 1.0,
        max_norm: float | None = None,
    ) -> Self:
        """Train ``count`` times on this rank's share of one global batch, at ``factor`` of the rate; returns itself."""
        batches_of_rank = len(batches) // self.engine.rank_info.dp_size
        first = self.engine.rank_info.dp_rank * batches_of_rank
        share = batches[first : first + batches_of_rank]
        for _ in range(count):
            done = train_step(
                self.model, self.optimizer, share, objective or CausalLM(), factor, self.state, max_norm=max_norm
            )
            self.losses.append(float(done.loss.loss))
            self.norms.append(float(done.grad_norm))
            self.weight_norms.append(float(self.model.parameter_norm()))
            self.metrics.append({name: float(value) for name, value in done.loss.metrics.items()})
        return self

    def logits(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Return the logits of the batches [batch, seq, vocab]."""
        return torch.cat([self.model.forward(batch.input_ids) for batch in batches])

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of this rank's elements of all parameters, masters where there are some."""
        return copied((name, elements(value, name)) for name, value in self.model.state_dict().items())

    def moved(self) -> dict[str, torch.Tensor]:
        """Return the change of each parameter since the start, in float64."""
        return {name: value.double() - self._before[name].double() for name, value in self.weights().items()}
