"""NxD Core's ``parallel_state``: this rank's place in the layout, and the groups that it communicates in."""

from __future__ import annotations

import torch.distributed as dist

from nxdt_plugin_nxd_core.arguments import binds
from nxdt_plugin_nxd_core.config import current_config
from nxdt_plugin_nxd_core.errors import ConfigNotMade
from nxdt_plugin_nxd_core.groups import Groups

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

Group = dist.ProcessGroup | list[list[int]] | None


def model_parallel_is_initialized() -> bool:
    """Return whether ``neuronx_distributed_config`` has built the mesh."""
    return current_config() is not None


def get_tensor_model_parallel_size() -> int:
    """Return the number of ranks that share each parallel layer."""
    return _groups().size("tp")


def get_tensor_model_parallel_rank() -> int:
    """Return this rank's number among those that share its layers."""
    return _groups().rank("tp")


@binds()
def get_tensor_model_parallel_group(as_list: bool = False) -> Group:
    """Return the process group of the ranks that share this rank's layers, or the ranks of all such groups.

    Args:
        as_list: return the lists of ranks, as :func:`get_tensor_model_parallel_replica_groups` does.

    Returns:
        None for the group of a program of one process, which has none.
    """
    return _groups().ranks("tp") if as_list else _groups().group("tp")


def get_tensor_model_parallel_replica_groups() -> list[list[int]]:
    """Return the ranks of each tensor parallel group."""
    return _groups().ranks("tp")


def get_data_parallel_size() -> int:
    """Return the number of ranks that read different samples."""
    return _groups().size("dp")


def get_data_parallel_rank() -> int:
    """Return this rank's number among those that read different samples."""
    return _groups().rank("dp")


@binds()
def get_data_parallel_group(as_list: bool = False) -> Group:
    """Return the process group of the ranks that hold this rank's parameters, or the ranks of all such groups.

    See :func:`get_tensor_model_parallel_group`.
    """
    return _groups().ranks("dp") if as_list else _groups().group("dp")


def get_data_parallel_replica_groups() -> list[list[int]]:
    """Return the ranks of each data parallel group."""
    return _groups().ranks("dp")


def get_pipeline_model_parallel_size() -> int:
    """Return the number of pipeline stages."""
    return _groups().size("pp")


def get_pipeline_model_parallel_rank() -> int:
    """Return the number of this rank's pipeline stage."""
    return _groups().rank("pp")


@binds()
def get_pipeline_model_parallel_group(as_list: bool = False) -> Group:
    """Return the process group of the ranks that share this rank's pipeline, or the ranks of all such groups.

    See :func:`get_tensor_model_parallel_group`.
    """
    return _groups().ranks("pp") if as_list else _groups().group("pp")


def get_pipeline_model_parallel_replica_groups() -> list[list[int]]:
    """Return the ranks of each pipeline."""
    return _groups().ranks("pp")


def get_context_model_parallel_size() -> int:
    """Return 1: each rank of a caller's own module sees whole sequences."""
    return 1


def get_context_model_parallel_rank() -> int:
    """Return 0; see :func:`get_context_model_parallel_size`."""
    return 0


def get_expert_model_parallel_size() -> int:
    """Return 1: a caller's own module has no experts that ranks share out."""
    return 1


def get_expert_model_parallel_rank() -> int:
    """Return 0; see :func:`get_expert_model_parallel_size`."""
    return 0


def _groups() -> Groups:
    config = current_config()
    if config is None:
        raise ConfigNotMade(call="parallel_state")
    return config.groups
