"""Differences between the supported versions of torch, 2.9 to 2.15, under one name each.

Each name looks for the newer call first, so that a fallback can be deleted with the version that needs it. How stages
of the stock pipeline differ is in :mod:`nxdt_core.engine.pipeline.stage`, and what an older version
cannot do is refused by :mod:`nxdt_core.engine.layout_rules`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed import distributed_c10d
from torch.nn import functional

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gather equal tensors of all ranks into one. Up to 2.12 torch has it under the longer name."""

reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Sum one tensor over all ranks and scatter equal parts of it."""

set_group_timeout: Any = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
"""Set the longest wait, a ``timedelta``, within one collective of a group that exists. Public from 2.14."""

grouped_mm: Any = getattr(functional, "grouped_mm", None)
"""Grouped matrix product, ``functional.grouped_mm``, from 2.10; None before."""


def forget_shardings() -> None:
    """Let DTensor forget the meshes of process groups that have ended, which it takes for equal ones of later groups.

    (Its cache of sharding returns the first mesh of those that are equal. A gradient would have it, and no group.)
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, debug

    propagate: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    clear = getattr(debug, "_clear_sharding_prop_cache", None) or propagate.cache.cache_clear
    clear()


def begin_all_to_all(
    tensor: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Return what an all-to-all will have put there when it is :func:`ended`. Torch has no public call that does not
    wait and that ``torch.compile`` traces."""
    begun: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(
        tensor, list(output_splits), list(input_splits), _named(group)
    )
    return begun


def traced(name: str, tensor: torch.Tensor, *arguments: Any, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the result of the functional collective ``name``, which changes no tensor in place and which passes over
    compiled graphs know."""
    return ended(getattr(torch.ops._c10d_functional, name)(tensor, *arguments, _named(group)))


def ended(begun: torch.Tensor) -> torch.Tensor:
    """Return the result of a collective that has begun, for which the device waits."""
    result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(begun)
    return result


def _named(group: dist.ProcessGroup) -> Any:
    """Return what functional collectives take for a group: from 2.13 itself where a graph is traced, else its name."""
    convert = getattr(functional_collectives, "_group_or_group_name", None)
    return group.group_name if convert is None else convert(group)


def memory_info(device: torch.device | None = None) -> tuple[int, int]:
    """Return the free and the total bytes of an accelerator's memory; ``device`` is the current one by default."""
    if hasattr(torch.accelerator, "get_memory_info"):  # from 2.10
        free, total = torch.accelerator.get_memory_info(device)
    else:
        module = torch.get_device_module(device or torch.accelerator.current_accelerator())
        free, total = module.mem_get_info(device)
    return int(free), int(total)


def hash_meshes_alike() -> None:
    """Let device meshes that are equal have equal hashes in every process.

    Torch 2.13 pickles a mesh, with the hash that it has computed, into the key of a compiled graph. Python's hash of
    strings and of None differs from process to process, so that graphs of tensor parallel layers were never found.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if hasattr(DeviceMesh, "_stable_hash"):

        def hash_of_mesh(mesh: DeviceMesh) -> int:
            value: int | None = getattr(mesh, "_hash", None)
            if value is None:
                value = mesh._hash = int(mesh._stable_hash()[:15], 16)
            return value

        DeviceMesh.__hash__ = hash_of_mesh  # type: ignore[method-assign]


def unflatten(mesh: DeviceMesh, dim: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return ``mesh`` with the dimension ``dim`` split into dimensions of these sizes and names. Collective."""
    before = tuple(mesh.mesh_dim_names or ())
    index = before.index(dim)
    if hasattr(mesh, "_unflatten"):  # from 2.10; 2.11 takes no name
        return mesh._unflatten(index, sizes, names)
    from torch.distributed.device_mesh import DeviceMesh

    names = (*before[:index], *names, *before[index + 1 :])
    split = mesh.mesh.unflatten(index, sizes)  # type: ignore[no-untyped-call]
    return DeviceMesh(mesh.device_type, split, mesh_dim_names=names)


def fsdp_parameter_groups(state: Any) -> tuple[Any, ...]:
    """Return the parameter groups of the state that FSDP2 keeps for a module. Up to 2.11 there is at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return tuple(state._fsdp_param_groups)
    return () if state._fsdp_param_group is None else (state._fsdp_param_group,)


def run_agent(settings: Mapping[str, Any], command: Sequence[str], *, signals: str) -> None:
    """Run ``command`` as the ranks of this node under torch's elastic agent.

    Args:
        settings: fields of torch's ``LaunchConfig``.
        command: of each rank; its first word is the executable.
        signals: names of those that the agent passes on to the ranks. 2.9 always takes SIGINT and SIGTERM as well, but
            only in the main thread, so that the agent runs in another one and takes none.

    Raises:
        ChildFailedError: a rank failed.
    """
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    executable, *arguments = command
    if "signals_to_handle" in {field.name for field in fields(LaunchConfig)}:  # from 2.10
        launch_agent(LaunchConfig(**settings, signals_to_handle=signals), executable, arguments)
        return
    with ThreadPoolExecutor(1, "elastic-agent") as thread:
        thread.submit(launch_agent, LaunchConfig(**settings), executable, arguments).result()
