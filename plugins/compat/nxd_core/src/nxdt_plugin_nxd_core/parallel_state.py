"""NxD Core's ``parallel_state``: this rank's place in the layout, and the groups that it communicates in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from nxdt_plugin_nxd_core.arguments import binds
from nxdt_plugin_nxd_core.config import DIMENSIONS, current_config, required_config

__all__ = [
    "get_context_model_parallel_rank",
    "get_context_model_parallel_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_replica_groups",
    "get_data_parallel_size",
    "get_expert_model_parallel_rank",
    "get_expert_model_parallel_size",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_replica_groups",
    "get_pipeline_model_parallel_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_replica_groups",
    "get_tensor_model_parallel_size",
    "model_parallel_is_initialized",
]


def model_parallel_is_initialized() -> bool:
    """Return whether ``neuronx_distributed_config`` has built the mesh."""
    return current_config() is not None


def _along(dimension: str, prefix: str) -> tuple[Callable[[], int], Callable[[], int], Callable[..., Any], Any]:
    """Return NxD Core's four functions of a dimension: size, rank, group, and replica groups."""

    def size() -> int:
        """Return the number of ranks along this dimension."""
        return len(replica_groups()[0])

    def rank() -> int:
        """Return this rank's number along this dimension."""
        return required_config("parallel_state").rank(dimension)

    def group(as_list: bool = False) -> dist.ProcessGroup | list[list[int]] | None:
        """Return the process group of this rank along this dimension, or with ``as_list`` the ranks of all of them.

        A program of one process has no process group, and gets None.
        """
        if as_list:
            return replica_groups()
        mesh = required_config("parallel_state").mesh
        return None if mesh is None else mesh.get_group(dimension)

    def replica_groups() -> list[list[int]]:
        """Return the ranks of each group along this dimension."""
        mesh = required_config("parallel_state").mesh
        return [[0]] if mesh is None else mesh.mesh.movedim(DIMENSIONS.index(dimension), -1).flatten(0, 1).tolist()

    for function in (size, rank, group, replica_groups):
        function.__qualname__ = f"get_{prefix}_parallel_{function.__name__}"
    return size, rank, binds(group), replica_groups


(
    get_tensor_model_parallel_size,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_replica_groups,
) = _along("tp", "tensor_model")
(
    get_data_parallel_size,
    get_data_parallel_rank,
    get_data_parallel_group,
    get_data_parallel_replica_groups,
) = _along("dp", "data")
(
    get_pipeline_model_parallel_size,
    get_pipeline_model_parallel_rank,
    get_pipeline_model_parallel_group,
    get_pipeline_model_parallel_replica_groups,
) = _along("pp", "pipeline_model")


def get_context_model_parallel_size() -> int:
    """Return 1: each rank sees whole sequences, and a caller's own module has no experts that ranks share out."""
    return 1


def get_context_model_parallel_rank() -> int:
    """Return 0; see :func:`get_context_model_parallel_size`."""
    return 0


get_expert_model_parallel_size = get_context_model_parallel_size
get_expert_model_parallel_rank = get_context_model_parallel_rank
