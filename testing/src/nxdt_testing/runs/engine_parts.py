"""The plugin file of the engine contract: a model that follows every kind of plan, and an adapter. No torch here."""

from __future__ import annotations

from nxdt_core.api import AdapterComponent, ModelComponent, hookimpl


@hookimpl
def nxdt_models() -> list[ModelComponent]:
    """Return a small mixture of experts."""
    return [
        ModelComponent(
            name="engine-contract",
            target="nxdt_testing.models.moe:MoEBuilder",
            config="nxdt_testing.models.moe_config:MoEModelConfig",
            summary="a small mixture of experts, for tests of engines",
            capabilities=frozenset({"tp", "sp", "pp", "cp", "ep"}),
        )
    ]


@hookimpl
def nxdt_adapters() -> list[AdapterComponent]:
    """Return one that adds a scale."""
    return [
        AdapterComponent(
            name="engine-contract",
            target="nxdt_testing.models.scale_adapter:ScaleAdapter",
            summary="trains one added scale, for tests of engines",
        )
    ]
