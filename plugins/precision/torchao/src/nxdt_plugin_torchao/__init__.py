"""Entry module of ``nxdt-plugin-torchao``: declares the precision policy."""

from __future__ import annotations

from nxdt_core.api import PrecisionComponent, hookimpl


@hookimpl
def nxdt_precision_policies() -> list[PrecisionComponent]:
    """Declare float8 training."""
    return [
        PrecisionComponent(
            name="float8",
            target="nxdt_plugin_torchao.policy:float8",
            config="nxdt_plugin_torchao.config:Float8Config",
            requires=frozenset({"linear_product"}),
            summary="float8 products in linear layers, the rest as mixed_precision or autocast",
        )
    ]
