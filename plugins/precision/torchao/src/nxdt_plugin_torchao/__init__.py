"""Entry module of ``nxdt-plugin-torchao``: declares the precision policy and the optimizer."""

from __future__ import annotations

from nxdt_core.api import Component, hookimpl


@hookimpl
def nxdt_precisions() -> list[Component]:
    """Declare float8 training."""
    return [
        Component(
            name="float8",
            target="nxdt_plugin_torchao.config:float8",
            config="nxdt_plugin_torchao.config:Float8Config",
            summary="float8 products in linear layers, the rest as mixed_precision or autocast",
        )
    ]


@hookimpl
def nxdt_optimizers() -> list[Component]:
    """Declare AdamW with state of 8 bits."""
    return [
        Component(
            name="adamw_8bit",
            target="nxdt_plugin_torchao.adamw_8bit:AdamW8bit",
            config="nxdt_plugin_torchao.config:AdamW8bitConfig",
            summary="AdamW with running means in 8 bits (Dettmers et al. 2022, arXiv:2110.02861)",
            capabilities=frozenset({"sharded"}),
        )
    ]
