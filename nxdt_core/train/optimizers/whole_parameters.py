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
from itertools import chain, product
from typing import Any

import torch
import torch.distributed as dist

from nxdt_core.distributed.collectives import all_reduce_bucketed, all_to_all, gather_along
from nxdt_core.distributed.devices import profile_of
from nxdt_core.engine.optim.state import EagerOptimizer
from nxdt_core.models.patterns import matches_any
from nxdt_core.protocols.optimizer import ParameterGroup, ParameterShard, as_torch, shards_of
from nxdt_core.protocols.tensor_shards import TensorSlice
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
class TrainedShard:
    """This rank's elements of a parameter that has a gradient; without the zeros that fill up padded ones."""

    parameter: torch.Tensor
    """Parameter as the optimizer holds it; the key of its state."""
    shard: ParameterShard
    group: dict[str, Any]
    weight: torch.Tensor
    grad: torch.Tensor


def trained_shards(
    param_groups: Iterable[dict[str, Any]], shards: Mapping[torch.Tensor, ParameterShard]
) -> list[TrainedShard]:
    """Return the parameters that have a gradient, in an order that all ranks share: it is there on all of them or on
    none."""
    return [
        TrainedShard(
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


def sum_over_shards(local_shards: Sequence[TrainedShard], values: Sequence[torch.Tensor]) -> None:
    """Add to each value what other ranks found over their pieces of the same parameter, in place. Collective."""
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for local, value in zip(local_shards, values, strict=True):
        by_groups.setdefault(local.shard.groups, []).append(value)
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
        trained = trained_shards(self.param_groups, self._shards)
        sums = [_sums(local) for local in trained]
        sum_over_shards(trained, sums)
        for local, total in zip(trained, sums, strict=True):
            means = total[1:]
            state, shape = self.state[local.parameter], local.shard.shape
            if not state:
                state["step"] = torch.zeros(())
                if _factored(local.shard):
                    state["row_var"] = means.new_zeros(shape[:-1])
                    state["col_var"] = means.new_zeros((*shape[:-2], shape[-1]))
                else:
                    state["variance"] = torch.zeros_like(local.parameter, dtype=means.dtype)
            state["step"] += 1
            weight = float(state["step"]) ** local.group["beta2_decay"]
            if _factored(local.shard):
                rows, columns = torch.split(means, [state["row_var"].numel(), state["col_var"].numel()])
                state["row_var"].lerp_(rows.view_as(state["row_var"]), weight)
                state["col_var"].lerp_(columns.view_as(state["col_var"]), weight)
            else:
                local.shard.real(state["variance"]).lerp_(to_float32(local.grad).square(), weight)
            local.grad.mul_(self._inverse_root(local).to(local.grad.dtype))
        update_squares = [square_sum(local.grad) for local in trained]
        sum_over_shards(trained, update_squares)
        for local, total, update_square in zip(trained, sums, update_squares, strict=True):
            self._apply(local, total[0], update_square)

    def _inverse_root(self, local: TrainedShard) -> torch.Tensor:
        """Return the factors that multiply the gradients of this rank."""
        state: dict[str, torch.Tensor] = self.state[local.parameter]
        lowest: float | None = local.group["eps"][0]
        eps = float(torch.finfo(local.weight.dtype).eps) if lowest is None else lowest
        if not _factored(local.shard):
            return local.shard.real(state["variance"]).clamp(min=eps * eps).rsqrt_()
        row_mean = state["row_var"].mean(dim=-1, keepdim=True).clamp_(min=eps)
        row_region, column_region = _regions(local.shard)
        rows: torch.Tensor = (state["row_var"] / row_mean)[row_region].unsqueeze(-1)
        return (rows * state["col_var"][column_region].unsqueeze(-2)).clamp_(min=eps * eps).rsqrt_()

    def _apply(self, local: TrainedShard, weight_square: torch.Tensor, update_square: torch.Tensor) -> None:
        group, elements = local.group, math.prod(local.shard.shape)
        relative = min(group["lr"], float(self.state[local.parameter]["step"]) ** -0.5)
        size = (weight_square / elements).sqrt().clamp(min=group["eps"][1])
        excess = ((update_square / elements).sqrt() / group["d"]).clamp(min=1.0)
        local.weight.mul_(1 - group["lr"] * group["weight_decay"])
        local.weight.sub_(local.grad * (relative * size / excess).to(local.grad.dtype))


def _sums(local: TrainedShard) -> torch.Tensor:
    """This rank's part of: the weights' sum of squares, the mean squares of each row, those of each column."""
    shard, weight_square = local.shard, square_sum(local.weight)
    if not _factored(shard):
        return weight_square.reshape(1)
    squares = to_float32(local.grad).square()
    rows = squares.new_zeros(shard.shape[:-1])
    columns = squares.new_zeros((*shard.shape[:-2], shard.shape[-1]))
    row_region, column_region = _regions(shard)
    rows[row_region] = squares.sum(-1) / shard.shape[-1]
    columns[column_region] = squares.sum(-2) / shard.shape[-2]
    return torch.cat([weight_square.reshape(1), rows.flatten(), columns.flatten()])


def _factored(shard: ParameterShard) -> bool:
    """Return whether the parameter has fewer rows and columns together than elements."""
    return len(shard.shape) >= 2 and min(shard.shape[-2:]) > 1


def _regions(shard: ParameterShard) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Positions of this rank's rows among all rows, and of its columns among all columns."""
    at = tuple(slice(start, start + size) for start, size in zip(shard.region.offsets, shard.region.shape, strict=True))
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
        trained = trained_shards(self.param_groups, self._shards)
        squares = [square_sum(local.grad) for local in trained]
        sum_over_shards(trained, squares)
        for local, square in zip(trained, squares, strict=True):
            group, state = local.group, self.state[local.parameter]
            beta1, beta2 = group["betas"]
            if not state:
                state["exp_avg"] = torch.zeros_like(local.parameter)
                state["exp_avg_sq"] = square
            else:
                state["exp_avg_sq"].lerp_(square, 1 - beta2)
            update = local.grad.div_((state["exp_avg_sq"].sqrt() + group["eps"]).to(local.grad.dtype))
            update.add_(local.weight, alpha=group["weight_decay"])
            if group["grad_averaging"]:
                update.mul_(1 - beta1)
            mean = local.shard.real(state["exp_avg"])
            mean.mul_(beta1).add_(update)
            local.weight.add_(mean, alpha=-group["lr"])


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
        regions_here = [[[*s.region.offsets, *padding][:dims], [*s.region.shape, *padding][:dims]] for s in shards]
        table = torch.tensor(regions_here, dtype=torch.int64, device=self._nothing.device)
        for group in reversed(self._groups):
            table = gather_along(table[None], 0, group)
        by_place = table.reshape(len(self._places), *table.shape[-3:]).tolist()
        self._regions = {
            place: [
                TensorSlice(tuple(offsets[: len(shard.shape)]), tuple(shape[: len(shard.shape)]))
                for (offsets, shape), shard in zip(regions, shards, strict=True)
            ]
            for place, regions in zip(self._places, by_place, strict=True)
        }
        by_size = sorted(range(len(shards)), key=lambda index: -math.prod(shards[index].shape))
        ranks = len(self._places)
        self.rounds = [by_size[start : start + ranks] for start in range(0, len(shards), ranks)]
        """Parameters of similar size to bring together at a time, at most one per rank."""
        self._owner = {index: self._places[at] for indexes in self.rounds for at, index in enumerate(indexes)}
        self._shapes = [shard.shape for shard in shards]

    def gather(self, local_shards: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the whole parameters that this rank owns of those of a round, from all ranks' pieces. Collective."""
        shards = {(index, self._here): local.reshape(-1) for index, local in local_shards.items()}
        for axis in reversed(range(len(self._groups))):
            sent, received = self._traffic(list(local_shards), axis)
            shards = self._move(shards, sent, received, axis)
        wholes: dict[int, torch.Tensor] = {}
        for (index, place), local in shards.items():
            if index not in wholes:
                wholes[index] = local.new_empty(self._shapes[index])
            region = self._regions[place][index]
            wholes[index][region.within(TensorSlice.whole(self._shapes[index]))] = local.view(region.shape)
        return wholes

    def scatter(self, wholes: Mapping[int, torch.Tensor], indexes: Sequence[int]) -> dict[int, torch.Tensor]:
        """This rank's pieces of the parameters of a round, from their owners. Collective."""
        shards: dict[_Key, torch.Tensor] = {}
        for index, whole in wholes.items():
            for place in self._places:
                region = self._regions[place][index].within(TensorSlice.whole(self._shapes[index]))
                shards[index, place] = whole[region].reshape(-1)
        for axis in range(len(self._groups)):
            received, sent = self._traffic(indexes, axis)
            shards = self._move(shards, sent, received, axis)
        return {index: local.view(self._regions[self._here][index].shape) for (index, _), local in shards.items()}

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
        self, shards: Mapping[_Key, torch.Tensor], sent: list[list[_Key]], received: list[list[_Key]], axis: int
    ) -> dict[_Key, torch.Tensor]:
        outgoing = [shards[key] for keys in sent for key in keys]
        flat = torch.cat(outgoing) if outgoing else self._nothing
        counts_in, counts_out = (
            [[self._regions[place][index].elements for index, place in keys] for keys in traffic]
            for traffic in (received, sent)
        )
        arrived = all_to_all(flat, [*map(sum, counts_in)], [*map(sum, counts_out)], self._groups[axis])
        keys = [*chain.from_iterable(received)]
        return dict(zip(keys, torch.split(arrived, [*chain.from_iterable(counts_in)]), strict=True))


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
        alike: dict[_Groups, list[TrainedShard]] = {}
        for local in trained_shards(self.param_groups, self._shards):
            if local.parameter in self._matrices:
                alike.setdefault(local.shard.groups, []).append(local)
        for local_shards in alike.values():
            self._update(local_shards)
        super().step()

    def _update(self, local_shards: list[TrainedShard]) -> None:
        """Update matrices that are cut over the same ranks, and take their gradients, so that AdamW leaves them."""
        key = (local_shards[0].shard.groups, tuple(id(local.parameter) for local in local_shards))
        if key not in self._exchanges:
            self._exchanges[key] = ShardExchange(
                [local.shard for local in local_shards],
                device=local_shards[0].parameter.device,
                dtype=self._dtype(local_shards[0]),
            )
        exchange, keep = self._exchanges[key], self._config.momentum
        for indexes in exchange.rounds:
            updates: dict[int, torch.Tensor] = {}  # before they are made orthogonal, in the dtype of the iterations
            for index in indexes:
                local, state = local_shards[index], self.state[local_shards[index].parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(local.parameter)
                mean = local.shard.real(state["momentum_buffer"])
                mean.lerp_(local.grad, 1 - keep)
                update = local.grad.lerp(mean, keep) if self._config.nesterov else mean
                updates[index] = update.to(self._dtype(local))
            wholes = exchange.gather(updates)
            for index, whole in wholes.items():
                wholes[index] = orthogonal(whole, self._config.ns_steps)
            for index, update in exchange.scatter(wholes, indexes).items():
                self._apply(local_shards[index], update)

    def _apply(self, local: TrainedShard, update: torch.Tensor) -> None:
        rows, columns = local.shard.shape[-2:]
        scale = math.sqrt(max(1.0, rows / columns))
        if self._config.adjust_lr == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(rows, columns))
        lr = local.group["lr"]
        local.weight.mul_(1 - lr * local.group["weight_decay"])
        local.weight.add_(update, alpha=-lr * scale)
        local.parameter.grad = None

    def _dtype(self, local: TrainedShard) -> torch.dtype:
        if self._config.ns_dtype is not None:
            dtype: torch.dtype = getattr(torch, self._config.ns_dtype)
            return dtype
        on_host = profile_of(local.parameter.device).host
        return torch.promote_types(local.parameter.dtype, torch.float32) if on_host else torch.bfloat16


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
