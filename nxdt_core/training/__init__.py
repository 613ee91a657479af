"""Training: core primitives, the Lightning classes over them, and the run that a YAML file describes.

``primitives`` needs no Lightning; the names below are imported when first used, so that it stays so.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxdt_core.training.lightning.datamodule import NxdtDataModule
    from nxdt_core.training.lightning.module import NxdtModule
    from nxdt_core.training.lightning.strategy import NxdtStrategy
    from nxdt_core.training.primitives import (
        initialize_parallel_model,
        initialize_parallel_optimizer,
        load_checkpoint,
        save_checkpoint,
        train_step,
    )
    from nxdt_core.training.run.train import train

__all__ = [
    "NxdtDataModule",
    "NxdtModule",
    "NxdtStrategy",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "load_checkpoint",
    "save_checkpoint",
    "train",
    "train_step",
]

_HOME = {
    "NxdtDataModule": "lightning.datamodule",
    "NxdtModule": "lightning.module",
    "NxdtStrategy": "lightning.strategy",
    "train": "run.train",
}


if not TYPE_CHECKING:  # a type checker that sees it takes every misspelt name for Any

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOME.get(name, 'primitives')}"), name)
