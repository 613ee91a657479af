"""Entry module of ``nxdt-plugin-lightning``, and the classes for your own ``Trainer``.

The classes are imported when they are first used, so that listing plugins needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nxdt_core.api import Component, hookimpl

if TYPE_CHECKING:
    from nxdt_plugin_lightning.module import NxdtDataModule, NxdtModule
    from nxdt_plugin_lightning.strategy import NxdtStrategy

__all__ = ["NxdtDataModule", "NxdtModule", "NxdtStrategy"]


@hookimpl
def nxdt_callbacks() -> list[Component]:
    """Declare what lets ``nxdt train`` use loggers of Lightning."""
    return [
        Component(
            name="lightning",
            target="nxdt_plugin_lightning.logger:LightningLogger",
            config="nxdt_plugin_lightning.config:LoggerConfig",
            summary="a logger of PyTorch Lightning, such as Comet's or Neptune's",
        )
    ]


if not TYPE_CHECKING:  # a type checker that sees it takes every misspelt name for Any

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{'strategy' if name == 'NxdtStrategy' else 'module'}"), name)
