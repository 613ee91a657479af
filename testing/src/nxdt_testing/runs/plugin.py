"""The plugin file of runs of contracts: a model that follows every plan, an adapter, and data. No torch here."""

from __future__ import annotations

from nxdt_core.api import AdapterComponent, Component, ModelComponent, hookimpl


@hookimpl
def nxdt_models() -> list[ModelComponent]:
    """Return a small mixture of experts."""
    return [
        ModelComponent(
            name="engine-contract",
            target="nxdt_testing.runs.moe:MoEBuilder",
            config="nxdt_testing.runs.moe_config:MoEModelConfig",
            summary="a small mixture of experts, for tests of engines",
            capabilities=frozenset({"tp", "sp", "pp", "cp", "ep"}),
        )
    ]


@hookimpl
def nxdt_adapters() -> list[AdapterComponent]:
    """Return one that adds a scale."""
    target = "nxdt_testing.runs.moe:ScaleAdapter"
    return [AdapterComponent(name="engine-contract", target=target, summary="trains one added scale, for tests")]


@hookimpl
def nxdt_datasets() -> list[Component]:
    """Return a source of made-up tokens."""
    target = "nxdt_testing.runs.small_run:Tokens"
    return [Component(name="contract-tokens", target=target, summary="made-up tokens, for tests")]
