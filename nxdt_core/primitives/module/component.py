"""The plugin file of :mod:`nxdt_core.primitives`: a model that the caller's program builds. No torch here."""

from __future__ import annotations

from nxdt_core.api import ModelComponent, hookimpl


@hookimpl
def nxdt_models() -> list[ModelComponent]:
    """Return the model that ``initialize_parallel_model`` gets from its caller."""
    return [
        ModelComponent(
            name="nxd-core-module",
            target="nxdt_core.primitives.module.builder:ModuleBuilder",
            config="nxdt_core.primitives.module.component_config:ModuleConfig",
            summary="a module that a program builds with nxdt_core.primitives",
            capabilities=frozenset({"tp", "sp", "pp", "lora"}),
            tried_before_launch=False,
        )
    ]
