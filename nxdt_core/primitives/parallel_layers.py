"""NxD Core's ``parallel_layers``: tensor parallel layers, the loss, clipping, files of ranks, and a rank's place."""

from nxdt_core.primitives import parallel_state
from nxdt_core.primitives.files.rank_files import load, save
from nxdt_core.primitives.layers import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    clip_grad_norm,
    parallel_cross_entropy,
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
