"""Which elements of a parameter this rank holds, and which of them it speaks for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nxdt_core.parallel.mesh import Dimension, ParallelMesh

__all__ = ["Box", "box_of", "local_of", "owns", "sharded_over"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A block of a whole tensor."""

    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements as a plain tensor that shares their memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def box_of(tensor: torch.Tensor) -> Box:
    """Where this rank's elements lie in the whole tensor."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box(whole=shape, offsets=(0,) * len(shape), sizes=shape)
    sizes, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    return Box(whole=shape, offsets=tuple(offsets), sizes=tuple(sizes))


def sharded_over(tensor: torch.Tensor) -> frozenset[str]:
    """Names of the mesh dimensions along which ``tensor`` is cut."""
    if not isinstance(tensor, DTensor):
        return frozenset()
    names = tensor.device_mesh.mesh_dim_names or ()
    return frozenset(
        name
        for name, placement in zip(names, tensor.placements, strict=True)
        if not isinstance(placement, Replicate)  # is_shard() is False for FSDP2's strided shards
    )


def owns(tensor: torch.Tensor, mesh: ParallelMesh) -> bool:
    """Whether this rank is the first of those of its pipeline stage that hold the very same elements.

    Sums over parameters (the gradient's norm) count the owner's elements only.
    """
    cut = sharded_over(tensor)
    tensor_dims: tuple[Dimension, ...] = ("tp_kv_replica",) if "tp_kv" in cut else ("tp",)
    data_dims: tuple[Dimension, ...] = ("efsdp",) if "ep" in cut else ("fsdp",)
    return all(dim in cut or mesh.rank(dim) == 0 for dim in ("dp_replicate", *data_dims, *tensor_dims))
