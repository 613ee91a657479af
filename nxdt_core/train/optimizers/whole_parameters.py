"""Optimizers that look at whole parameters in any layout: Adafactor and NovoGrad, by sums over their shards, and Muon.

Ranks add up what they found over their pieces, so that norms and means on each are those of the whole parameter.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) makes momentum orthogonal, matrix by matrix. An
orthogonal update needs the whole matrix. Each matrix is brought together on one of the ranks that share it, so that
the iterations are shared out over data and tensor parallel ranks; replicas repeat them. The update is that of
``torch.optim.Muon``, for stacks of experts' matrices too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from nxdt_core.distributed.collectives import all_reduce_bucketed, all_to_all, gather_along
from nxdt_core.distributed.devices import profile_of
from nxdt_core.engine.optim.state import EagerOptimizer
from nxdt_core.models.patterns import matches_any
from nxdt_core.protocols.optimizer import ParameterGroup, ParameterShard, as_torch, shards_of
from nxdt_core.protocols.piece import Box
from nxdt_core.train.optimizers.config import AdafactorConfig, MuonConfig, NovogradConfig

_Place = tuple[int, ...]
"""A rank's coordinates among those that share the parameters."""
_Key = tuple[int, _Place]
"""A piece: which parameter, and the rank whose it is."""
_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration, chosen there for the steepest start."""
_EPS = 1e-7
_Groups = tuple[dist.ProcessGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPiece:
    """This rank's elements of a parameter that has a gradient; without the zeros that fill up padded ones."""

    parameter: torch.Tensor
    """Parameter as the optimizer holds it; the key of its state."""
    shard: ParameterShard
    group: dict[str, Any]
    weight: torch.Tensor
    grad: torch.Tensor


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
            means = found[1:]
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
                piece.shard.real(state["variance"]).lerp_(to_float32(piece.grad).square(), weight)
            piece.grad.mul_(self._inverse_root(piece).to(piece.grad.dtype))
        update_squares = [square_sum(piece.grad) for piece in trained]
        sum_over_pieces(trained, update_squares)
        for piece, found, update_square in zip(trained, sums, update_squares, strict=True):
            self._apply(piece, found[0], update_square)

    def _inverse_root(self, piece: TrainedPiece) -> torch.Tensor:
        """Return the factors that multiply the gradients of this rank."""
        state: dict[str, torch.Tensor] = self.state[piece.parameter]
        lowest: float | None = piece.group["eps"][0]
        eps = float(torch.finfo(piece.weight.dtype).eps) if lowest is None else lowest
        if not _factored(piece.shard):
            return piece.shard.real(state["variance"]).clamp(min=eps * eps).rsqrt_()
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
            mean = piece.shard.real(state["exp_avg"])
            mean.mul_(beta1).add_(update)
            piece.weight.add_(mean, alpha=-group["lr"])


class ShardExchange:
    """Parameters that are cut over the same groups of ranks."""

    def __init__(self, shards: Sequence[ParameterShard], *, device: torch.device, dtype: torch.dtype) -> None:
        """Plan the exchange. Collective: the ranks of the groups pass their shards of the same parameters, in one
        order.

        Args:
            shards: at least one.
            device: device of the tensors that will be exchanged.
            dtype: dtype of these tensors.
        """
        self._groups = shards[0].groups
        self._nothing = torch.empty(0, device=device, dtype=dtype)
        self._sizes = tuple(group.size() for group in self._groups)
        self._here = tuple(group.rank() for group in self._groups)
        self._places: list[_Place] = list(product(*map(range, self._sizes)))
        dims = max(len(shard.shape) for shard in shards)
        padding = [0] * dims
        own = [[[*s.box.offsets, *padding][:dims], [*s.box.shape, *padding][:dims]] for s in shards]
        table = torch.tensor(own, dtype=torch.int64, device=self._nothing.device)
        for group in reversed(self._groups):
            table = gather_along(table[None], 0, group)
        by_place = table.reshape(len(self._places), *table.shape[-3:]).tolist()
        self._boxes = {
            place: [
                Box(tuple(offsets[: len(shard.shape)]), tuple(shape[: len(shard.shape)]))
                for (offsets, shape), shard in zip(boxes, shards, strict=True)
            ]
            for place, boxes in zip(self._places, by_place, strict=True)
        }
        by_size = sorted(range(len(shards)), key=lambda index: -math.prod(shards[index].shape))
        ranks = len(self._places)
        self.rounds = [by_size[start : start + ranks] for start in range(0, len(shards), ranks)]
        """Parameters of similar size to bring together at a time, at most one per rank."""
        self._owner = {index: self._places[at] for indexes in self.rounds for at, index in enumerate(indexes)}
        self._shapes = [shard.shape for shard in shards]

    def gather(self, pieces: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the whole parameters that this rank owns of those of a round, from all ranks' pieces. Collective."""
        held = {(index, self._here): piece.reshape(-1) for index, piece in pieces.items()}
        for axis in reversed(range(len(self._groups))):
            sent, received = self._traffic(list(pieces), axis)
            held = self._move(held, sent, received, axis)
        wholes: dict[int, torch.Tensor] = {}
        for (index, place), piece in held.items():
            if index not in wholes:
                wholes[index] = piece.new_empty(self._shapes[index])
            box = self._boxes[place][index]
            wholes[index][box.within(Box.whole(self._shapes[index]))] = piece.view(box.shape)
        return wholes

    def scatter(self, wholes: Mapping[int, torch.Tensor], indexes: Sequence[int]) -> dict[int, torch.Tensor]:
        """This rank's pieces of the parameters of a round, from their owners. Collective."""
        held = {
            (index, place): whole[self._boxes[place][index].within(Box.whole(self._shapes[index]))].reshape(-1)
            for index, whole in wholes.items()
            for place in self._places
        }
        for axis in range(len(self._groups)):
            received, sent = self._traffic(indexes, axis)
            held = self._move(held, sent, received, axis)
        return {index: piece.view(self._boxes[self._here][index].shape) for (index, _), piece in held.items()}

    def _traffic(self, indexes: Sequence[int], axis: int) -> tuple[list[list[_Key]], list[list[_Key]]]:
        """Return what this rank sends to each along ``axis`` on the way to the owners, and what it has from each."""
        ranks = range(self._sizes[axis])
        sent: list[list[_Key]] = [[] for _ in ranks]
        received: list[list[_Key]] = [[] for _ in ranks]
        for index in indexes:
            owner = self._owner[index]
            if owner[axis + 1 :] != self._here[axis + 1 :]:
                continue
            for inner in product(*map(range, self._sizes[axis + 1 :])):
                sent[owner[axis]].append((index, (*self._here[: axis + 1], *inner)))
                if owner[axis] == self._here[axis]:
                    for rank in ranks:
                        received[rank].append((index, (*self._here[:axis], rank, *inner)))
        return sent, received

    def _move(
        self, held: Mapping[_Key, torch.Tensor], sent: list[list[_Key]], received: list[list[_Key]], axis: int
    ) -> dict[_Key, torch.Tensor]:
        outgoing = [held[key] for keys in sent for key in keys]
        flat = torch.cat(outgoing) if outgoing else self._nothing
        counts = [[self._elements(key) for key in keys] for keys in received]
        arrived = all_to_all(
            flat,
            [sum(each) for each in counts],
            [sum(map(self._elements, keys)) for keys in sent],
            self._groups[axis],
        )
        keys = [key for each in received for key in each]
        parts = torch.split(arrived, [count for each in counts for count in each])
        return dict(zip(keys, parts, strict=True))

    def _elements(self, key: _Key) -> int:
        index, place = key
        return self._boxes[place][index].elements


class Muon(EagerOptimizer, torch.optim.AdamW):
    """Orthogonal updates of hidden matrices; AdamW's of everything else."""

    def __init__(self, groups: list[ParameterGroup], config: MuonConfig) -> None:
        super().__init__(as_torch(groups), betas=config.betas, eps=config.eps, fused=False)
        self._config = config
        self._shards = shards_of(groups)
        self._matrices = {
            parameter
            for group in groups
            for name, parameter in zip(group["names"], group["params"], strict=True)
            if self._shards[parameter].matrix and not matches_any(config.adamw_params, name)
        }
        self._exchanges: dict[tuple[_Groups, tuple[int, ...]], ShardExchange] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        alike: dict[_Groups, list[TrainedPiece]] = {}
        for piece in trained_pieces(self.param_groups, self._shards):
            if piece.parameter in self._matrices:
                alike.setdefault(piece.shard.groups, []).append(piece)
        for pieces in alike.values():
            self._update(pieces)
        super().step()

    def _update(self, pieces: list[TrainedPiece]) -> None:
        """Update matrices that are cut over the same ranks, and take their gradients, so that AdamW leaves them."""
        key = (pieces[0].shard.groups, tuple(id(piece.parameter) for piece in pieces))
        if key not in self._exchanges:
            self._exchanges[key] = ShardExchange(
                [piece.shard for piece in pieces], device=pieces[0].parameter.device, dtype=self._dtype(pieces[0])
            )
        exchange, keep = self._exchanges[key], self._config.momentum
        for indexes in exchange.rounds:
            updates: dict[int, torch.Tensor] = {}  # before they are made orthogonal, in the dtype of the iterations
            for index in indexes:
                piece, state = pieces[index], self.state[pieces[index].parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(piece.parameter)
                mean = piece.shard.real(state["momentum_buffer"])
                mean.lerp_(piece.grad, 1 - keep)
                update = piece.grad.lerp(mean, keep) if self._config.nesterov else mean
                updates[index] = update.to(self._dtype(piece))
            wholes = exchange.gather(updates)
            for index, whole in wholes.items():
                wholes[index] = orthogonal(whole, self._config.ns_steps)
            for index, update in exchange.scatter(wholes, indexes).items():
                self._apply(pieces[index], update)

    def _apply(self, piece: TrainedPiece, update: torch.Tensor) -> None:
        rows, columns = piece.shard.shape[-2:]
        scale = math.sqrt(max(1.0, rows / columns))
        if self._config.adjust_lr == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(rows, columns))
        lr = piece.group["lr"]
        piece.weight.mul_(1 - lr * piece.group["weight_decay"])
        piece.weight.add_(update, alpha=-lr * scale)
        piece.parameter.grad = None

    def _dtype(self, piece: TrainedPiece) -> torch.dtype:
        if self._config.ns_dtype is not None:
            dtype: torch.dtype = getattr(torch, self._config.ns_dtype)
            return dtype
        on_host = profile_of(piece.parameter.device).host
        return torch.promote_types(piece.parameter.dtype, torch.float32) if on_host else torch.bfloat16


def orthogonal(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the matrices [..., rows, columns] with their singular values brought near 1 (0.5 to 1.5), by Newton-Schulz
    steps."""
    a, b, c = _QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    update = matrices.mT if tall else matrices
    update = update.reshape(-1, *update.shape[-2:])
    update = update / update.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(steps):
        gram = update @ update.mT
        update = torch.baddbmm(update, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), update, beta=a)
    return (update.mT if tall else update).reshape(matrices.shape)
