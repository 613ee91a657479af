"""Initial magnitudes of DoRA (arXiv:2402.09353): the norms of the base's weights."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from nxdt_core.distributed.placement import piece_of
from nxdt_core.models.updates import Update
from nxdt_core.protocols.parallel_model import ParallelModel

__all__ = ["init_magnitudes"]

_MAGNITUDE = "lora_magnitude"


@torch.no_grad()
def init_magnitudes(model: ParallelModel) -> None:
    """Set each magnitude to the norm of its output feature's weights, so that the update starts as the identity.

    Collective: each rank gathers every weight in full, one at a time.
    """
    parameters = dict(model.named_parameters())
    updates = {
        path: (part, module.get_parameter(f"{path.removesuffix('.update')}.weight"))
        for module in model.local_modules()
        for path, part in module.named_modules()
        if isinstance(part, Update) and hasattr(part, _MAGNITUDE)
    }
    for path, (update, weight) in updates.items():
        magnitude = parameters[f"{path}.{_MAGNITUDE}"]
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        wide = torch.promote_types(whole.dtype, torch.float32)
        norms = torch.linalg.vector_norm(whole, dim=update.inputs, dtype=wide)
        piece = piece_of(magnitude)
        piece.tensor.copy_(norms[piece.box.within(piece_of(norms).box)])
