"""NxD Core's training API: a loop that was written for it moves by changing its imports.

This is also the plugin's entry module. Names are imported when they are first used, so that its import needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nxdt_core.api import ModelComponent, hookimpl

if TYPE_CHECKING:
    from nxdt_plugin_nxd_core import parallel_layers, parallel_state
    from nxdt_plugin_nxd_core.config import LoraConfig, NxDConfig, neuronx_distributed_config
    from nxdt_plugin_nxd_core.model import LoRAModel, NxDModel, initialize_parallel_model
    from nxdt_plugin_nxd_core.optimizer import NeuronZero1Optimizer, NxDOptimizer, initialize_parallel_optimizer
    from nxdt_plugin_nxd_core.tags import finalize_checkpoint, has_checkpoint, load_checkpoint, save_checkpoint

__all__ = [
    "LoRAModel",
    "LoraConfig",
    "NeuronZero1Optimizer",
    "NxDConfig",
    "NxDModel",
    "NxDOptimizer",
    "finalize_checkpoint",
    "has_checkpoint",
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "load_checkpoint",
    "neuronx_distributed_config",
    "parallel_layers",
    "parallel_state",
    "save_checkpoint",
]


@hookimpl
def nxdt_models() -> list[ModelComponent]:
    """Declare the model that ``initialize_parallel_model`` gets from its caller."""
    return [
        ModelComponent(
            name="nxd-core-module",
            target="nxdt_plugin_nxd_core.builder:ModuleBuilder",
            summary="a module that a program builds with nxdt-plugin-nxd-core",
            capabilities=frozenset({"tp", "sp", "pp", "lora"}),
            tried_before_launch=False,
        )
    ]


if not TYPE_CHECKING:  # a type checker that sees it takes every misspelt name for Any

    def __getattr__(name: str) -> Any:
        if name in ("parallel_layers", "parallel_state"):
            return import_module(f"{__name__}.{name}")
        if name in __all__:
            for module in ("config", "model", "optimizer", "tags"):
                home = import_module(f"{__name__}.{module}")
                if hasattr(home, name):
                    return getattr(home, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
