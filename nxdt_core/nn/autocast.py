"""The dtype that matrix products run in: what autocast makes of the dtype of their inputs."""

from __future__ import annotations

import torch

from nxdt_core.nn.scoped import Scoped

__all__ = ["compute_dtype", "planned_autocast"]

planned_autocast: Scoped[torch.dtype | None] = Scoped(None)
"""Autocast's dtype on the meta device, where runs are planned: torch has none there."""


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product of ``tensor`` runs. Autocast leaves float64 as it is."""
    if tensor.dtype == torch.float64:
        return tensor.dtype
    if tensor.is_meta:
        return planned_autocast.value or tensor.dtype
    kind = tensor.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype
