"""A plugin file with what parity needs and no run does: float64 throughout."""

from __future__ import annotations

from nxdt_core.api import Component, ModelComponent, hookimpl
from nxdt_core.protocols.precision import PrecisionPolicy


def float64(config: object) -> PrecisionPolicy:
    return PrecisionPolicy(name="float64", parameters="float64", gradients="float64", optimizer_state="float64")


@hookimpl
def nxdt_models() -> list[ModelComponent]:
    return [
        ModelComponent(
            name="moe-test",
            target="nxdt_testing.runs.moe:MoEBuilder",
            config="nxdt_testing.runs.moe_config:MoEModelConfig",
            capabilities=frozenset({"tp", "sp", "pp", "cp", "ep"}),
        )
    ]


@hookimpl
def nxdt_precisions() -> list[Component]:
    return [Component(name="float64", target=f"{__name__}:float64")]
