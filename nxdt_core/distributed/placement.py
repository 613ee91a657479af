"""The elements of a tensor that this rank holds.

A process that runs alone has no sharded tensor and does not import ``torch.distributed.tensor``, which takes 0.5 to 1
CPU-seconds. :func:`is_dtensor` and :func:`is_fsdp_module` find out without it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from nxdt_core.errors.checkpoints import TensorStateUnsupported
from nxdt_core.protocols.tensor_shards import LocalShard, TensorSlice

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

__all__ = [
    "is_dtensor",
    "is_fsdp_module",
    "local_of",
    "local_shard_of",
    "placed_like",
    "shard_over_mesh",
    "sharded_over",
]


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Return whether ``value`` is a DTensor. There is none while its module is not imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_fsdp_module(value: object) -> TypeIs[FSDPModule]:
    """Return whether ``value`` is a module that FSDP2 shards. There is none while FSDP2 is not imported."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(value, module.FSDPModule)


def shard_over_mesh(local: torch.Tensor, mesh: DeviceMesh, *dims: int | None) -> DTensor:
    """Return the DTensor of which each rank has an equal shard such as ``local``.

    Args:
        local: shard of this rank.
        mesh: ranks that have the shards.
        dims: dimension of the tensor that each mesh dimension shards; None where its ranks have copies.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    return DTensor.from_local(local, mesh, placements, run_check=False)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements as a plain tensor that shares their memory."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local


def placed_like(local: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``local`` as this rank's elements of a tensor that is distributed like ``tensor``; unchanged if ``tensor``
    is plain."""
    if not is_dtensor(tensor):
        return local
    placed: torch.Tensor = type(tensor).from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return placed


def local_shard_of(tensor: torch.Tensor | LocalShard, name: str = "a tensor") -> LocalShard:
    """Return this rank's elements of ``tensor`` and their region in the whole; a shard is returned unchanged.

    Args:
        tensor: plain tensors are whole.
        name: name of the tensor, for messages.

    Raises:
        TensorStateUnsupported: the tensor is distributed as partial sums, or torch gives another place than the one
            that its local elements fill.
    """
    if isinstance(tensor, LocalShard):
        return tensor
    shape = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return LocalShard(tensor, shape, TensorSlice.whole(shape))
    if any(placement.is_partial() for placement in tensor.placements):
        raise TensorStateUnsupported(where=name, reason="it is distributed as partial sums")
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = local_of(tensor)
    sizes, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    if sizes != tuple(local.shape):  # seen with strided shards of what two dimensions both cut unevenly (torch 2.13)
        reason = f"torch places {sizes} of it here, and {tuple(local.shape)} are here ({tensor.placements})"
        raise TensorStateUnsupported(where=name, reason=reason)
    # An empty shard has no place; torch puts it at the end, on the border of the tensor.
    return LocalShard(local, shape, TensorSlice(tuple(offsets), sizes))


def sharded_over(tensor: torch.Tensor) -> frozenset[str]:
    """Return the names of the mesh dimensions along which ``tensor`` is cut."""
    if not is_dtensor(tensor):
        return frozenset()
    names = tensor.device_mesh.mesh_dim_names or ()
    return frozenset(
        name
        for name, placement in zip(names, tensor.placements, strict=True)
        if not placement.is_replicate()  # is_shard() is False for FSDP2's strided shards
    )
