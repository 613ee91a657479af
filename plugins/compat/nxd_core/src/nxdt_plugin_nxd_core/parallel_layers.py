"""NxD Core's ``parallel_layers``: the layers, their loss, and what works on the run of this process group."""

from __future__ import annotations

from nxdt_plugin_nxd_core import parallel_state
from nxdt_plugin_nxd_core.layers import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    parallel_cross_entropy,
)
from nxdt_plugin_nxd_core.optimizer import clip_grad_norm
from nxdt_plugin_nxd_core.rank_files import load, save

__all__ = [
    "ColumnParallelLinear",
    "GQAQKVColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
    "clip_grad_norm",
    "load",
    "parallel_cross_entropy",
    "parallel_state",
    "save",
]
