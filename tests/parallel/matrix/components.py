"""A plugin file with what parity needs and no run does: float64 throughout, and gradient descent without state."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nxdt_core.api import ModelComponent, OptimizerComponent, PrecisionComponent, hookimpl
from nxdt_core.protocols.optimizer import ParameterGroup
from nxdt_core.protocols.precision import PrecisionPolicy


@dataclass(kw_only=True)
class SGDConfig:
    """Plain gradient descent."""

    lr: float = 0.1
    weight_decay: float = 0.0


def sgd(groups: list[ParameterGroup], config: SGDConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD([dict(group) for group in groups], lr=config.lr)


def float64(config: object) -> PrecisionPolicy:
    return PrecisionPolicy(
        name="float64", parameters="float64", gradients="float64", reductions="float64", optimizer_state="float64"
    )


@hookimpl
def nxdt_model_builders() -> list[ModelComponent]:
    return [
        ModelComponent(
            name="moe-test",
            target="nxdt_core.testing.moe_model:MoEBuilder",
            config="nxdt_core.testing.moe_config:MoEModelConfig",
        )
    ]


@hookimpl
def nxdt_optimizers() -> list[OptimizerComponent]:
    return [OptimizerComponent(name="sgd", target=f"{__name__}:sgd", config=f"{__name__}:SGDConfig")]


@hookimpl
def nxdt_precision_policies() -> list[PrecisionComponent]:
    return [PrecisionComponent(name="float64", target=f"{__name__}:float64")]
