"""Section ``distributed_strategy``: the layout over devices. The docstrings are the YAML reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nxdt_core.config.marks import PositiveInt

__all__ = ["DistributedStrategyConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedStrategyConfig:
    """Sizes of the dimensions; what is left of the world is data parallel."""

    tensor_model_parallel_size: PositiveInt = 1
    """Devices that share each layer's matrices (TP)."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Devices that share the stack of layers (PP)."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = 1
    """Chunks of layers on each pipeline device (VPP); ``null`` means 1."""
    context_parallel_size: PositiveInt = 1
    """Devices that share each sequence (CP)."""
    expert_model_parallel_size: PositiveInt = 1
    """Devices that share the experts (EP), borrowed from data and context parallelism."""
    dp_replicate: PositiveInt = 1
    """Groups of devices that hold a whole copy each under ``zero_stage: 3`` (hybrid sharding)."""
    sequence_parallel: bool = False
    """Shard activations between tensor-parallel layers along the sequence; has no effect with TP 1."""
    zero1: bool = True
    """Shard optimizer state and master weights over data parallel ranks."""
    zero_stage: Literal[1, 2, 3] | None = None
    """1 shards optimizer state, 2 gradients too, 3 weights too; ``null`` follows ``zero1``."""
    pipeline_schedule: Literal["1f1b", "interleaved", "zbv"] | None = None
    """Order of micro-batches in the pipeline; ``null`` takes ``interleaved`` with VPP above 1, else ``1f1b``."""
    kv_replicator: PositiveInt = 1
    """Copies of each key and value head, where TP exceeds their number."""
    token_shuffle_group_size: PositiveInt = 1
    """Data parallel ranks that exchange tokens before experts."""
    pipeline_model_parallel_split_rank: int | None = None
    """First pipeline rank of a decoder, for encoder-decoder models."""
