"""NxD Core's ``parallel_state``: this rank's place in the layout, and the groups that it communicates in.

Ranks are numbered as there: neighbours are tensor parallel, then come data parallel ranks, and pipeline stages are the
farthest apart.
"""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist

from nxdt_core.errors.primitives import ConfigNotMade
from nxdt_core.primitives.arguments import binds
from nxdt_core.primitives.config import current_config
from nxdt_core.protocols.parallel.called import CalledMesh

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

_Dim = Literal["tp", "dp", "pp"]
Group = dist.ProcessGroup | list[list[int]] | None


def model_parallel_is_initialized() -> bool:
    """Return whether ``neuronx_distributed_config`` has built the mesh."""
    return current_config() is not None


def get_tensor_model_parallel_size() -> int:
    """Return the number of ranks that share each parallel layer."""
    return _mesh().size("tp")


def get_tensor_model_parallel_rank() -> int:
    """Return this rank's number among those that share its layers."""
    return _mesh().rank("tp")


@binds()
def get_tensor_model_parallel_group(as_list: bool = False) -> Group:
    """Return the process group of the ranks that share this rank's layers, or the ranks of all such groups.

    Args:
        as_list: return the lists of ranks, as :func:`get_tensor_model_parallel_replica_groups` does.

    Returns:
        None for the group of a program of one process, which has none.
    """
    return _ranks_of("tp") if as_list else _group("tp")


def get_tensor_model_parallel_replica_groups() -> list[list[int]]:
    """Return the ranks of each tensor parallel group."""
    return _ranks_of("tp")


def get_data_parallel_size() -> int:
    """Return the number of ranks that read different samples."""
    return _mesh().size("dp")


def get_data_parallel_rank() -> int:
    """Return this rank's number among those that read different samples."""
    return _mesh().rank("dp")


@binds()
def get_data_parallel_group(as_list: bool = False) -> Group:
    """Return the process group of the ranks that hold this rank's parameters, or the ranks of all such groups.

    See :func:`get_tensor_model_parallel_group`.
    """
    return _ranks_of("dp") if as_list else _group("dp")


def get_data_parallel_replica_groups() -> list[list[int]]:
    """Return the ranks of each data parallel group."""
    return _ranks_of("dp")


def get_pipeline_model_parallel_size() -> int:
    """Return the number of pipeline stages."""
    return _mesh().size("pp")


def get_pipeline_model_parallel_rank() -> int:
    """Return the number of this rank's pipeline stage."""
    return _mesh().rank("pp")


@binds()
def get_pipeline_model_parallel_group(as_list: bool = False) -> Group:
    """Return the process group of the ranks that share this rank's pipeline, or the ranks of all such groups.

    See :func:`get_tensor_model_parallel_group`.
    """
    return _ranks_of("pp") if as_list else _group("pp")


def get_pipeline_model_parallel_replica_groups() -> list[list[int]]:
    """Return the ranks of each pipeline."""
    return _ranks_of("pp")


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


def _mesh() -> CalledMesh:
    config = current_config()
    if config is None:
        raise ConfigNotMade(call="parallel_state")
    return config.engine.mesh


def _ranks_of(dim: _Dim) -> list[list[int]]:
    mesh = _mesh()
    sizes = {each: mesh.size(each) for each in ("tp", "dp", "pp")}
    strides = {"tp": 1, "dp": sizes["tp"], "pp": sizes["tp"] * sizes["dp"]}
    others = [each for each in sizes if each != dim]
    first = [
        a * strides[others[0]] + b * strides[others[1]]
        for b in range(sizes[others[1]])
        for a in range(sizes[others[0]])
    ]
    return [[start + number * strides[dim] for number in range(sizes[dim])] for start in sorted(first)]


def _group(dim: _Dim) -> dist.ProcessGroup | None:
    mesh = _mesh()
    if not dist.is_initialized():
        return None
    if dim == "dp":
        dim_of_group = "fsdp" if mesh.size("fsdp") == mesh.size("dp") else "dp_replicate"
        return mesh.mesh(dim_of_group).get_group()
    return mesh.mesh(dim).get_group()
