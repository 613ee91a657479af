"""The engine on stock torch: builds on meta, applies adapters and plan, materialises, trains.

One process here; sharding joins in this order without a change for models or callers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nxdt_core.config import ResolvedConfig
from nxdt_core.devices import current_device
from nxdt_core.nn.init import initialize
from nxdt_core.parallel.model import TorchModel
from nxdt_core.parallel.optimizer import TorchOptimizer, parameter_groups
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.engine import RankInfo
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.optimizer import OptimizerFactory
from nxdt_core.protocols.precision import PrecisionPolicy

__all__ = ["TorchEngine"]


class TorchEngine:
    """Built-in ``parallel_engine``; see :class:`nxdt_core.protocols.engine.ParallelEngine`."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.device = current_device(config.run.trainer.accelerator)
        self.rank_info = RankInfo(mesh={"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1})

    def start(self) -> None:
        """Nothing to join: one process."""

    def initialize_model(
        self,
        builder: ModelBuilder,
        *,
        precision: PrecisionPolicy,
        seed: int,
        adapters: Sequence[Adapter] = (),
        materialise: bool = True,
    ) -> TorchModel:
        """Build the model on the device; ``materialise=False`` leaves its values undefined for a load."""
        with torch.device("meta"):
            module = builder.build()
            plan = builder.plan()
            rules = list(builder.init_rules())
            for adapter in adapters:
                plan = adapter.apply(module, plan)
                rules = [*adapter.init_rules(), *rules]
        module.to(getattr(torch, precision.parameters))
        module.to_empty(device=self.device)
        tie(module, plan.tied)
        for part in module.modules():
            reset = getattr(part, "reset_buffers", None)
            if callable(reset):
                reset()
        model = TorchModel(module, plan, precision, self.device)
        if materialise:
            initialize(model.named_parameters(), rules, seed)
        return model

    def initialize_optimizer(
        self, model: TorchModel, factory: OptimizerFactory, config: Any, *, decay_norms: bool
    ) -> TorchOptimizer:
        """Build the optimizer over the model's decayed and undecayed parameters."""
        groups = parameter_groups(
            model.named_parameters(),
            model.plan,
            lr=config.lr,
            weight_decay=getattr(config, "weight_decay", 0.0),
            decay_norms=decay_norms,
        )
        return TorchOptimizer(factory(groups, config), groups)

    def broadcast_object(self, value: Any) -> Any:
        """``value``: the only rank is rank 0."""
        return value

    def shutdown(self) -> None:
        """Nothing to leave."""


def tie(module: nn.Module, tied: Sequence[tuple[str, str]]) -> None:
    """Make the second parameter of each pair the first; moving off the meta device separates them."""
    for owner, user in tied:
        path, _, leaf = user.rpartition(".")
        setattr(module.get_submodule(path), leaf, module.get_parameter(owner))
