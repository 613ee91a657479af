"""Which elements of a parameter this rank holds, and which of them it speaks for."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nxdt_core.parallel.mesh import Dimension, ParallelMesh
from nxdt_core.protocols.parallel.piece import Box, Piece

__all__ = ["local_of", "owns", "piece_of", "sharded_over"]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements as a plain tensor that shares their memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def piece_of(tensor: torch.Tensor) -> Piece:
    """This rank's elements and where they lie in the whole tensor."""
    shape, local = tuple(tensor.shape), local_of(tensor)
    if not isinstance(tensor, DTensor):
        return Piece(local, shape, Box.whole(shape))
    sizes, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    return Piece(local, shape, Box(tuple(offsets), tuple(sizes)))


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
