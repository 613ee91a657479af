"""NxD Core's ``parallel_layers``: tensor parallel layers, the loss, clipping, files of ranks, and a rank's place."""

from nxdt_plugin_nxd_core import parallel_state
from nxdt_plugin_nxd_core.files.rank_files import load, save
from nxdt_plugin_nxd_core.functional import clip_grad_norm, parallel_cross_entropy
from nxdt_plugin_nxd_core.layers import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)

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
