"""For optimizers that look at more than one element at a time: each parameter as a piece of its whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nxdt_core.distributed.bucketed_sums import sum_over
from nxdt_core.protocols.optimizer import ParameterShard

__all__ = ["TrainedPiece", "square_sum", "sum_over_pieces", "trained_pieces", "wide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPiece:
    """This rank's elements of a parameter that has a gradient; without the zeros that fill up padded ones."""

    parameter: torch.Tensor
    """As the optimizer holds it; the key of its state."""
    shard: ParameterShard
    group: dict[str, Any]
    weight: torch.Tensor
    grad: torch.Tensor

    def real(self, state: torch.Tensor) -> torch.Tensor:
        """Return the part of a state tensor of the parameter's shape that belongs to ``weight``."""
        return self.shard.real(state)


def trained_pieces(
    param_groups: Iterable[dict[str, Any]], shards: Mapping[torch.Tensor, ParameterShard]
) -> list[TrainedPiece]:
    """Return the parameters that have a gradient, in an order that all ranks share: it is there on all of them or on
    none."""
    return [
        TrainedPiece(
            parameter=parameter,
            shard=shards[parameter],
            group=group,
            weight=shards[parameter].real(parameter),
            grad=shards[parameter].real(parameter.grad),
        )
        for group in param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


def sum_over_pieces(pieces: Sequence[TrainedPiece], figures: Sequence[torch.Tensor]) -> None:
    """Add to each figure what other ranks found over their pieces of the same parameter, in place. Collective."""
    alike: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for piece, figure in zip(pieces, figures, strict=True):
        alike.setdefault(piece.shard.groups, []).append(figure)
    for groups, tensors in alike.items():
        for group in groups:
            sum_over(group, tensors)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in float32, or in float64 if it is that: what sums over many elements are made in."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def square_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of all squares, a scalar on the device."""
    return wide(tensor).square().sum()
