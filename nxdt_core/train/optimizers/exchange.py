"""Cut parameters brought together, each on one rank, and handed back: work on wholes is shared out, not repeated.

Pieces travel along one mesh dimension at a time, the innermost first, by one all-to-all each. A rank sends and
receives about as much as it holds, independent of the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import torch

from nxdt_core.distributed.collectives import all_to_all, gather_along
from nxdt_core.protocols.optimizer import ParameterShard
from nxdt_core.protocols.parallel.piece import Box

__all__ = ["Exchange"]

_Place = tuple[int, ...]
"""A rank's coordinates among those that share the parameters."""
_Key = tuple[int, _Place]
"""A piece: which parameter, and the rank whose it is."""


class Exchange:
    """Parameters that are cut over the same groups of ranks."""

    def __init__(self, shards: Sequence[ParameterShard], *, device: torch.device, dtype: torch.dtype) -> None:
        """Plan the exchange. Collective: the ranks of the groups pass their shards of the same parameters, in one
        order.

        Args:
            shards: at least one.
            device: where tensors are that will be exchanged.
            dtype: of these.
        """
        self._groups = shards[0].groups
        self._nothing = torch.empty(0, device=device, dtype=dtype)
        self._sizes = tuple(group.size() for group in self._groups)
        self._here = tuple(group.rank() for group in self._groups)
        self._places = list(_places(self._sizes))
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
        """What this rank sends to each along ``axis`` on the way to the owners, and what it has from each."""
        ranks = range(self._sizes[axis])
        sent: list[list[_Key]] = [[] for _ in ranks]
        received: list[list[_Key]] = [[] for _ in ranks]
        for index in indexes:
            owner = self._owner[index]
            if owner[axis + 1 :] != self._here[axis + 1 :]:
                continue
            for inner in _places(self._sizes[axis + 1 :]):
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


def _places(sizes: tuple[int, ...]) -> Iterator[_Place]:
    return product(*map(range, sizes))
