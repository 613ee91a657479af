"""Optimizers that look at whole parameters in any layout, by sums over their shards: Adafactor and NovoGrad.

Ranks add up what they found over their pieces, so that norms and means on each are those of the whole parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nxdt_core.distributed.collectives import all_reduce_bucketed
from nxdt_core.engine.optim.eager import EagerOptimizer
from nxdt_core.protocols.optimizer import ParameterGroup, ParameterShard, as_torch, shards_of
from nxdt_core.train.optimizers.config import AdafactorConfig, NovogradConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPiece:
    """This rank's elements of a parameter that has a gradient; without the zeros that fill up padded ones."""

    parameter: torch.Tensor
    """Parameter as the optimizer holds it; the key of its state."""
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


def sum_over_pieces(pieces: Sequence[TrainedPiece], values: Sequence[torch.Tensor]) -> None:
    """Add to each value what other ranks found over their pieces of the same parameter, in place. Collective."""
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for piece, value in zip(pieces, values, strict=True):
        by_groups.setdefault(piece.shard.groups, []).append(value)
    for groups, tensors in by_groups.items():
        for group in groups:
            all_reduce_bucketed(group, tensors)


def to_float32(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in float32, or in float64 if it is that: what sums over many elements are made in."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def square_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of all squares, a scalar on the device."""
    return to_float32(tensor).square().sum()


class Adafactor(EagerOptimizer):
    """Means of squared gradients by row and by column for matrices, by element for what is none."""

    def __init__(self, groups: list[ParameterGroup], config: AdafactorConfig) -> None:
        super().__init__(as_torch(groups), {"beta2_decay": config.beta2_decay, "eps": config.eps, "d": config.d})
        self._shards = shards_of(groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        trained = trained_pieces(self.param_groups, self._shards)
        sums = [_sums(piece) for piece in trained]
        sum_over_pieces(trained, sums)
        for piece, found in zip(trained, sums, strict=True):
            self._average(piece, found[1:])
            piece.grad.mul_(self._inverse_root(piece).to(piece.grad.dtype))
        update_squares = [square_sum(piece.grad) for piece in trained]
        sum_over_pieces(trained, update_squares)
        for piece, found, update_square in zip(trained, sums, update_squares, strict=True):
            self._apply(piece, found[0], update_square)

    def _average(self, piece: TrainedPiece, means: torch.Tensor) -> None:
        """Take this step's squares into the running means; ``means``: rows, then columns, if it has these."""
        state, shape = self.state[piece.parameter], piece.shard.shape
        if not state:
            state["step"] = torch.zeros(())
            if _factored(piece.shard):
                state["row_var"] = means.new_zeros(shape[:-1])
                state["col_var"] = means.new_zeros((*shape[:-2], shape[-1]))
            else:
                state["variance"] = torch.zeros_like(piece.parameter, dtype=means.dtype)
        state["step"] += 1
        weight = float(state["step"]) ** piece.group["beta2_decay"]
        if _factored(piece.shard):
            rows, columns = torch.split(means, [state["row_var"].numel(), state["col_var"].numel()])
            state["row_var"].lerp_(rows.view_as(state["row_var"]), weight)
            state["col_var"].lerp_(columns.view_as(state["col_var"]), weight)
        else:
            piece.real(state["variance"]).lerp_(to_float32(piece.grad).square(), weight)

    def _inverse_root(self, piece: TrainedPiece) -> torch.Tensor:
        """Return the factors that multiply the gradients of this rank."""
        state: dict[str, torch.Tensor] = self.state[piece.parameter]
        lowest: float | None = piece.group["eps"][0]
        eps = float(torch.finfo(piece.weight.dtype).eps) if lowest is None else lowest
        if not _factored(piece.shard):
            return piece.real(state["variance"]).clamp(min=eps * eps).rsqrt_()
        row_mean = state["row_var"].mean(dim=-1, keepdim=True).clamp_(min=eps)
        row_box, column_box = _boxes(piece.shard)
        rows: torch.Tensor = (state["row_var"] / row_mean)[row_box].unsqueeze(-1)
        return (rows * state["col_var"][column_box].unsqueeze(-2)).clamp_(min=eps * eps).rsqrt_()

    def _apply(self, piece: TrainedPiece, weight_square: torch.Tensor, update_square: torch.Tensor) -> None:
        group, elements = piece.group, math.prod(piece.shard.shape)
        relative = min(group["lr"], float(self.state[piece.parameter]["step"]) ** -0.5)
        size = (weight_square / elements).sqrt().clamp(min=group["eps"][1])
        excess = ((update_square / elements).sqrt() / group["d"]).clamp(min=1.0)
        piece.weight.mul_(1 - group["lr"] * group["weight_decay"])
        piece.weight.sub_(piece.grad * (relative * size / excess).to(piece.grad.dtype))


def _sums(piece: TrainedPiece) -> torch.Tensor:
    """This rank's part of: the weights' sum of squares, the mean squares of each row, those of each column."""
    shard, weight_square = piece.shard, square_sum(piece.weight)
    if not _factored(shard):
        return weight_square.reshape(1)
    squares = to_float32(piece.grad).square()
    rows = squares.new_zeros(shard.shape[:-1])
    columns = squares.new_zeros((*shard.shape[:-2], shard.shape[-1]))
    row_box, column_box = _boxes(shard)
    rows[row_box] = squares.sum(-1) / shard.shape[-1]
    columns[column_box] = squares.sum(-2) / shard.shape[-2]
    return torch.cat([weight_square.reshape(1), rows.flatten(), columns.flatten()])


def _factored(shard: ParameterShard) -> bool:
    """Return whether the parameter has fewer rows and columns together than elements."""
    return len(shard.shape) >= 2 and min(shard.shape[-2:]) > 1


def _boxes(shard: ParameterShard) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Positions of this rank's rows among all rows, and of its columns among all columns."""
    at = tuple(slice(start, start + size) for start, size in zip(shard.box.offsets, shard.box.shape, strict=True))
    return at[:-1], (*at[:-2], at[-1])


class Novograd(EagerOptimizer):
    """One running mean a weight and one running square a parameter."""

    def __init__(self, groups: list[ParameterGroup], config: NovogradConfig) -> None:
        defaults = {"betas": config.betas, "eps": config.eps, "grad_averaging": config.grad_averaging}
        super().__init__(as_torch(groups), defaults)
        self._shards = shards_of(groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        trained = trained_pieces(self.param_groups, self._shards)
        squares = [square_sum(piece.grad) for piece in trained]
        sum_over_pieces(trained, squares)
        for piece, square in zip(trained, squares, strict=True):
            group, state = piece.group, self.state[piece.parameter]
            beta1, beta2 = group["betas"]
            if not state:
                state["exp_avg"] = torch.zeros_like(piece.parameter)
                state["exp_avg_sq"] = square
            else:
                state["exp_avg_sq"].lerp_(square, 1 - beta2)
            update = piece.grad.div_((state["exp_avg_sq"].sqrt() + group["eps"]).to(piece.grad.dtype))
            update.add_(piece.weight, alpha=group["weight_decay"])
            if group["grad_averaging"]:
                update.mul_(1 - beta1)
            mean = piece.real(state["exp_avg"])
            mean.mul_(beta1).add_(update)
            piece.weight.add_(mean, alpha=-group["lr"])
