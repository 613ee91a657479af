"""Adafactor (Shazeer & Stern 2018, arXiv:1804.04235) over shards: the means of rows and columns are the whole's.

The update is that of ``torch.optim.Adafactor``. Ranks add up what they found over their pieces, in two calls per step;
the means are then whole on each of them, a row and a column a matrix, and so fit any layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from nxdt_core.protocols.optimizer import ParameterGroup, ParameterShard, as_torch, shards_of
from nxdt_core.train.optimizers.config import AdafactorConfig
from nxdt_core.train.optimizers.pieces import TrainedPiece, square_sum, sum_over_pieces, trained_pieces, wide

__all__ = ["Adafactor"]


class Adafactor(torch.optim.Optimizer):
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
            piece.real(state["variance"]).lerp_(wide(piece.grad).square(), weight)

    def _inverse_root(self, piece: TrainedPiece) -> torch.Tensor:
        """What this rank's gradients are multiplied with."""
        state: dict[str, torch.Tensor] = self.state[piece.parameter]
        eps = _eps(piece)
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
    squares = wide(piece.grad).square()
    rows = squares.new_zeros(shard.shape[:-1])
    columns = squares.new_zeros((*shard.shape[:-2], shard.shape[-1]))
    row_box, column_box = _boxes(shard)
    rows[row_box] = squares.sum(-1) / shard.shape[-1]
    columns[column_box] = squares.sum(-2) / shard.shape[-2]
    return torch.cat([weight_square.reshape(1), rows.flatten(), columns.flatten()])


def _factored(shard: ParameterShard) -> bool:
    """Whether rows and columns together are fewer than elements."""
    return len(shard.shape) >= 2 and min(shard.shape[-2:]) > 1


def _boxes(shard: ParameterShard) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Positions of this rank's rows among all rows, and of its columns among all columns."""
    at = tuple(slice(start, start + size) for start, size in zip(shard.box.offsets, shard.box.shape, strict=True))
    return at[:-1], (*at[:-2], at[-1])


def _eps(piece: TrainedPiece) -> float:
    lowest: float | None = piece.group["eps"][0]
    return float(torch.finfo(piece.weight.dtype).eps) if lowest is None else lowest
