"""A small model that trains in this process with the built-in engine, for contracts that look at what training does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch

from nxdt_core.distributed.placement import piece_of
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.train import build
from nxdt_core.train.causal_lm import CausalLM
from nxdt_core.train.state import TrainState
from nxdt_core.train.step import initialize_parallel_optimizer, train_step
from nxdt_testing.models.moe import MoEBuilder
from nxdt_testing.models.moe_config import MoEConfig, MoEModelConfig
from nxdt_testing.runs.layouts import global_batch, run_config

__all__ = ["OneProcess", "small_decoder"]

_SEED, _LENGTH = 11, 16


def small_decoder() -> MoEBuilder:
    """Return the builder of a decoder with one expert, which has no choice that rounding could change."""
    only = MoEConfig(num_experts=1, top_k=1, router_aux_loss_coef=0.0, router_z_loss_coef=0.0)
    return MoEBuilder(MoEModelConfig(moe=only))


class OneProcess:
    """Trains on one global batch, again at each step; a context that ends its engine."""

    def __init__(
        self,
        builder: ModelBuilder,
        policy: PrecisionPolicy,
        *,
        optimizer: str = "sgd",
        lr: float = 0.5,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self.config = run_config(_LENGTH, (f"model.optim.name={optimizer}", f"model.optim.lr={lr}"))
        self.engine = build.engine(self.config)
        with ExitStack() as unless_built:  # an error of what is tested leaves no process group to later tests
            unless_built.callback(self.engine.shutdown)
            self.engine.start()
            self.model = self.engine.initialize_model(builder, precision=policy, seed=_SEED, adapters=adapters)
            for adapter in adapters:
                adapter.begin(self.model, self.config, self.engine.ranks)
            self.optimizer = initialize_parallel_optimizer(self.config, self.engine, self.model)
            unless_built.pop_all()
        self.batches: list[Batch] = global_batch(builder.vocab_size, _LENGTH, documents=False)
        self.trained = frozenset(name for name, parameter in self.model.named_parameters() if parameter.requires_grad)
        self.losses: list[float] = []
        self._before = self.weights()
        self._state = TrainState()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.shutdown()

    def steps(self, count: int) -> Self:
        """Take steps; returns itself."""
        for _ in range(count):
            done = train_step(
                self.model, self.optimizer, self.batches, CausalLM(), lambda step: 1.0, self._state, max_norm=None
            )
            self.losses.append(float(done.loss.loss))
        return self

    def logits(self) -> torch.Tensor:
        """Return the logits of the batch."""
        return torch.cat([self.model.forward(batch.input_ids) for batch in self.batches])

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of all parameters, masters where there are some."""
        return _tensors(self.model.state_dict())

    def moved(self) -> dict[str, torch.Tensor]:
        """Return the change of each parameter since the start, in float64."""
        return {name: value.double() - self._before[name].double() for name, value in self.weights().items()}


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: piece_of(held, name).tensor.detach().clone() for name, held in state.items()}
