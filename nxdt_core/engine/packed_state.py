"""Optimizer state: what an optimizer keeps, and in what form checkpoints have it.

See :class:`nxdt_core.protocols.optimizer.PackedState`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nxdt_core.protocols.optimizer import OptimizerFactory, PackedState, ParameterGroup, ParameterShard

__all__ = ["packed_state", "stepped_once", "unpacked_state"]


def unpacked_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Mapping[str, Any]:
    """Return the state of ``parameter`` as checkpoints have it; empty before the first step."""
    held: Mapping[str, Any] = optimizer.state.get(parameter, {})
    return optimizer.unpacked(parameter) if held and isinstance(optimizer, PackedState) else held


def packed_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state``, as a checkpoint has it, in the form that ``optimizer`` keeps it in."""
    return optimizer.packed(parameter, state) if isinstance(optimizer, PackedState) else dict(state)


def stepped_once(
    factory: OptimizerFactory,
    config: object,
    parameters: Sequence[torch.nn.Parameter],
    shards: Sequence[ParameterShard] | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer over ``parameters`` after a step with gradients of zeros, to see what state it keeps.

    Args:
        factory: of the optimizer.
        config: its section.
        parameters: its only group.
        shards: one per parameter; None: each is whole.
    """
    names = [f"probe.{number}" for number in range(len(parameters))]
    group = ParameterGroup(params=[*parameters], names=names, lr=getattr(config, "lr", 0.0), weight_decay=0.0)
    if shards is not None:
        group["shards"] = [*shards]
    optimizer = factory([group], config)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer
