"""DoRA's trained norms at their start: those of the rows of the base's weights."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from nxdt_core.parallel.placement import piece_of
from nxdt_core.protocols.engine import ParallelModel

__all__ = ["take_norms"]

_MAGNITUDE = ".update.lora_magnitude"


@torch.no_grad()
def take_norms(model: ParallelModel) -> None:
    """Set each norm to that of its row, where B is zero and the update is none. Collective: each weight is whole on
    every rank for a moment, one at a time."""
    parameters = dict(model.named_parameters())
    for name, magnitude in parameters.items():
        if not name.endswith(_MAGNITUDE):
            continue
        weight = parameters[f"{name.removesuffix(_MAGNITUDE)}.weight"]
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        norms = torch.linalg.vector_norm(whole, dim=1, dtype=torch.promote_types(whole.dtype, torch.float32))
        piece = piece_of(magnitude)
        piece.tensor.copy_(norms[piece.box.within(piece_of(norms).box)])
