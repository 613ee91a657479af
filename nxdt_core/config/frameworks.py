"""Frameworks whose files can be migrated, and the keys that show which one a file is of."""

from __future__ import annotations

from nxdt_core.config.node import Node

__all__ = ["FRAMEWORKS", "framework_of"]

FRAMEWORKS = {"nxdt": "NxD Training", "nemo": "NeMo 1.x", "nnm": "neuronx-nemo-megatron"}
"""Value of ``--from`` → name."""

_NEMO = (
    "model.tensor_model_parallel_size",
    "model.pipeline_model_parallel_size",
    "model.micro_batch_size",
    "model.global_batch_size",
    "model.data",
    "model.tokenizer",
    "model.mcore_gpt",
)
_NNM = (
    "model.wrap_with_zero",
    "model.zero_use_master_weight",
    "model.zero_use_fp32_grad_accum",
    "model.flexible_pipeline_parallel_stages",
    "enable_checkpoint_removal_protection",
)
_NXDT = (
    "distributed_strategy",
    "model_source",
    "model_alignment_strategy",
    "aync_exec_max_inflight_requests",
    "data.global_batch_size",
    "model.model_config",
)


def framework_of(tree: Node) -> tuple[str, str]:
    """Return the framework among :data:`FRAMEWORKS` that a file is of, and the key that shows it; empty for others."""
    for name, keys in (("nxdt", _NXDT), ("nnm", _NNM), ("nemo", _NEMO)):
        for key in keys:
            if tree.find(key) is not None:
                return name, key
    return "", ""
