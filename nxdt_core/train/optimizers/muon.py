"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): momentum made orthogonal, matrix by matrix.

An orthogonal update needs the whole matrix. Each matrix is brought together on one of the ranks that share it, so that
the iterations are shared out over data and tensor parallel ranks; replicas repeat them. The update is that of
``torch.optim.Muon``, for stacks of experts' matrices too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import torch
import torch.distributed as dist

from nxdt_core.distributed.collectives import all_to_all, gather_along
from nxdt_core.distributed.devices import profile_of
from nxdt_core.engine.optim.eager import EagerOptimizer
from nxdt_core.models.patterns import matches_any
from nxdt_core.protocols.optimizer import ParameterGroup, ParameterShard, as_torch, shards_of
from nxdt_core.protocols.piece import Box
from nxdt_core.train.optimizers.config import MuonConfig
from nxdt_core.train.optimizers.whole_parameters import TrainedPiece, trained_pieces

_Place = tuple[int, ...]
"""A rank's coordinates among those that share the parameters."""
_Key = tuple[int, _Place]
"""A piece: which parameter, and the rank whose it is."""


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
        self._places = list(_grid_positions(self._sizes))
        self._boxes = self._all_boxes(shards)
        by_size = sorted(range(len(shards)), key=lambda index: -math.prod(shards[index].shape))
        ranks = len(self._places)
        self._rounds = [by_size[start : start + ranks] for start in range(0, len(shards), ranks)]
        self._owner = {index: self._places[at] for indexes in self._rounds for at, index in enumerate(indexes)}
        self._shapes = [shard.shape for shard in shards]

    def rounds(self) -> Iterator[list[int]]:
        """Yield the parameters of similar size to bring together at a time, at most one per rank."""
        return iter(self._rounds)

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
            for inner in _grid_positions(self._sizes[axis + 1 :]):
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

    def _all_boxes(self, shards: Sequence[ParameterShard]) -> dict[_Place, list[Box]]:
        """Every rank's piece of every parameter."""
        dims = max(len(shard.shape) for shard in shards)
        padding = [0] * dims
        own = [[[*s.box.offsets, *padding][:dims], [*s.box.shape, *padding][:dims]] for s in shards]
        table = torch.tensor(own, dtype=torch.int64, device=self._nothing.device)
        for group in reversed(self._groups):
            table = gather_along(table[None], 0, group)
        by_place = table.reshape(len(self._places), *table.shape[-3:]).tolist()
        return {
            place: [
                Box(tuple(offsets[: len(shard.shape)]), tuple(shape[: len(shard.shape)]))
                for (offsets, shape), shard in zip(boxes, shards, strict=True)
            ]
            for place, boxes in zip(self._places, by_place, strict=True)
        }


def _grid_positions(sizes: tuple[int, ...]) -> Iterator[_Place]:
    return product(*map(range, sizes))


_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration, chosen there for the steepest start."""
_EPS = 1e-7

_Groups = tuple[dist.ProcessGroup, ...]


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
        exchange = self._exchange(pieces)
        for indexes in exchange.rounds():
            updates = {index: self._momentum(pieces[index]) for index in indexes}
            wholes = exchange.gather(updates)
            for index, whole in wholes.items():
                wholes[index] = orthogonal(whole, self._config.ns_steps)
            for index, update in exchange.scatter(wholes, indexes).items():
                self._apply(pieces[index], update)

    def _momentum(self, piece: TrainedPiece) -> torch.Tensor:
        """This rank's elements of the update before it is made orthogonal, in the dtype of the iterations."""
        state: dict[str, torch.Tensor] = self.state[piece.parameter]
        keep = self._config.momentum
        if not state:
            state["momentum_buffer"] = torch.zeros_like(piece.parameter)
        mean = piece.real(state["momentum_buffer"])
        mean.lerp_(piece.grad, 1 - keep)
        update = piece.grad.lerp(mean, keep) if self._config.nesterov else mean
        return update.to(self._dtype(piece))

    def _apply(self, piece: TrainedPiece, update: torch.Tensor) -> None:
        rows, columns = piece.shard.shape[-2:]
        scale = math.sqrt(max(1.0, rows / columns))
        if self._config.adjust_lr == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(rows, columns))
        lr = piece.group["lr"]
        piece.weight.mul_(1 - lr * piece.group["weight_decay"])
        piece.weight.add_(update, alpha=-lr * scale)
        piece.parameter.grad = None

    def _exchange(self, pieces: list[TrainedPiece]) -> ShardExchange:
        """Made when matrices are first updated, on all of their ranks."""
        key = (pieces[0].shard.groups, tuple(id(piece.parameter) for piece in pieces))
        if key not in self._exchanges:
            self._exchanges[key] = ShardExchange(
                [piece.shard for piece in pieces], device=pieces[0].parameter.device, dtype=self._dtype(pieces[0])
            )
        return self._exchanges[key]

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
    found = matrices.mT if tall else matrices
    found = found.reshape(-1, *found.shape[-2:])
    found = found / found.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(steps):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return (found.mT if tall else found).reshape(matrices.shape)
