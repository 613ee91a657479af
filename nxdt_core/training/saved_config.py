"""The configuration that a checkpoint keeps, read back on one process, whatever layout its run had."""

from __future__ import annotations

from nxdt_core.checkpoint import Manifest
from nxdt_core.config import ResolvedConfig, load

__all__ = ["saved_config"]

_ONE_PROCESS = (
    "trainer.devices=1",
    "trainer.num_nodes=1",
    "model.pipeline_cuts=null",
    *(
        f"distributed_strategy.{key}=1"
        for key in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "dp_replicate",
        )
    ),
    "distributed_strategy.pipeline_schedule=null",
)
"""The layout of a checkpoint's run matters to that run alone: any process can load any."""


def saved_config(manifest: Manifest) -> ResolvedConfig:
    """The run that wrote the checkpoint, as it would be on one process.

    Raises:
        ConfigError: it cannot be had here; where a plugin is missing, the error names it.
    """
    return load(manifest.facts.config, _ONE_PROCESS)
