"""Which elements of a tensor this rank holds."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nxdt_core.errors.checkpoints import TensorStateUnsupported
from nxdt_core.protocols.piece import Box, Piece

__all__ = ["local_of", "piece_of", "placed_like", "sharded_over"]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements as a plain tensor that shares their memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local


def placed_like(local: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``local`` as this rank's elements of a tensor that is distributed like ``tensor``; unchanged if ``tensor``
    is plain."""
    if not isinstance(tensor, DTensor):
        return local
    placed: torch.Tensor = DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return placed


def piece_of(tensor: torch.Tensor | Piece, name: str = "a tensor") -> Piece:
    """Return this rank's elements of ``tensor`` and their box in the whole; a piece is returned unchanged.

    Args:
        tensor: plain tensors are whole.
        name: name of the tensor, for messages.

    Raises:
        TensorStateUnsupported: the tensor is distributed as partial sums, or torch gives another place than the one
            that its local elements fill.
    """
    if isinstance(tensor, Piece):
        return tensor
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Piece(tensor, shape, Box.whole(shape))
    if any(placement.is_partial() for placement in tensor.placements):
        raise TensorStateUnsupported(where=name, reason="it is distributed as partial sums")
    local = local_of(tensor)
    sizes, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    if sizes != tuple(local.shape):  # seen with strided shards of what two dimensions both cut unevenly (torch 2.13)
        reason = f"torch places {sizes} of it here, and {tuple(local.shape)} are here ({tensor.placements})"
        raise TensorStateUnsupported(where=name, reason=reason)
    # An empty shard has no place; torch puts it at the end, on the border of the tensor.
    return Piece(local, shape, Box(tuple(offsets), sizes))


def sharded_over(tensor: torch.Tensor) -> frozenset[str]:
    """Return the names of the mesh dimensions along which ``tensor`` is cut."""
    if not isinstance(tensor, DTensor):
        return frozenset()
    names = tensor.device_mesh.mesh_dim_names or ()
    return frozenset(
        name
        for name, placement in zip(names, tensor.placements, strict=True)
        if not isinstance(placement, Replicate)  # is_shard() is False for FSDP2's strided shards
    )
