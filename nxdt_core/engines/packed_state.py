"""Optimizer state in another form than checkpoints have it: :class:`nxdt_core.protocols.optimizer.PackedState`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nxdt_core.protocols.optimizer import PackedState

__all__ = ["packed_state", "unpacked_state"]


def unpacked_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Mapping[str, Any]:
    """Return the state of ``parameter`` as checkpoints have it; empty before the first step."""
    held: Mapping[str, Any] = optimizer.state.get(parameter, {})
    return optimizer.unpacked(parameter) if held and isinstance(optimizer, PackedState) else held


def packed_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state``, as a checkpoint has it, in the form that ``optimizer`` keeps it in."""
    return optimizer.packed(parameter, state) if isinstance(optimizer, PackedState) else dict(state)
