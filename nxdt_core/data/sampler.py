"""The order of the samples of a run: a pure function of (length, seed, position).

Position p counts samples from the start of the run over all ranks and epochs. It does not depend on ranks,
micro-batches or workers, which is why a run may be resumed in another layout.

A permutation of ``range(n)`` is computed, not stored: any part of it, at once, from (n, seed, epoch). A stored one of a
large corpus costs gigabytes and seconds on every rank at every start, and those of numpy's generators may change with
its version. This is a Feistel network over the square that just holds n (Black & Rogaway 2002, "Ciphers with arbitrary
finite domains", section 5): a bijection by construction, whose round keys come from Philox (Salmon et al. 2011), a
stream that numpy guarantees to be stable. On a small square such a network is visibly not random (on 3 x 3 it only
reaches even permutations), so a short order sorts random words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.cache import digest
from nxdt_core.errors.data import EmptyDataset
from nxdt_core.protocols.batch import Sample
from nxdt_core.protocols.dataset import DatasetSplits, IterableDataset, MapDataset, SplitName

Item = TypeVar("Item")

_SORTED_BELOW = 1 << 16
_ROUNDS = 8
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

_WINDOW = 4096
"""Positions computed together: spreads numpy's cost per call over many small batches."""


class Permutation:
    """The order of one epoch.

    Args:
        length: number of items, at least 1.
        seed: any integer; the same on all ranks.
        epoch: 0, 1, 2, …; each gives another order.
    """

    def __init__(self, length: int, *, seed: int, epoch: int) -> None:
        if length < 1:
            raise ValueError(f"length must be positive, not {length}")
        self._length = length
        self._side = np.uint64(math.isqrt(length - 1) + 1)  # side**2 >= length, by less than 2 * side
        mask = (1 << 64) - 1
        key = np.array([seed & mask, epoch & mask], dtype=np.uint64)
        random = np.random.Philox(key=key)
        self._stored = None
        if length < _SORTED_BELOW:
            self._stored = np.argsort(random.random_raw(length), kind="stable")
        else:
            self._keys = random.random_raw(2 * _ROUNDS)

    def __len__(self) -> int:
        return self._length

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the items at ``positions`` (any shape, each within the length)."""
        if self._stored is not None:
            return self._stored[positions]
        items = self._encrypt(positions.astype(np.uint64))
        outside = items >= self._length
        while outside.any():  # walk the cycle until it comes back into the range; rarely more than a step
            items[outside] = self._encrypt(items[outside])
            outside = items >= self._length
        return items.astype(np.int64)

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values // self._side, values % self._side
        for turn in range(_ROUNDS):
            noise = right * self._keys[2 * turn] + self._keys[2 * turn + 1]
            # The finaliser of SplitMix64 (Steele, Lea & Flood 2014); multiplication wraps around.
            noise = (noise ^ (noise >> np.uint64(30))) * _MIX_1
            noise = (noise ^ (noise >> np.uint64(27))) * _MIX_2
            noise ^= noise >> np.uint64(31)
            left, right = right, (left + noise % self._side) % self._side
        result: NDArray[np.uint64] = left * self._side + right
        return result


def draw(items: Sequence[Item], count: int, *, seed: int) -> tuple[list[Item], list[Item]]:
    """Return ``count`` items drawn by ``seed``, and the others; both in the order of ``items``, which are not empty."""
    order = Permutation(len(items), seed=seed, epoch=0).take(np.arange(len(items), dtype=np.int64))
    drawn, others = ([items[i] for i in sorted(part.tolist())] for part in (order[:count], order[count:]))
    return drawn, others


class GlobalOrder:
    """Sample indices in the order of the run, epoch after epoch.

    Raises:
        EmptyDataset: ``length`` is 0.
    """

    def __init__(self, length: int, *, seed: int, shuffle: bool) -> None:
        if length < 1:
            raise EmptyDataset()
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._permutation: tuple[int, Permutation] | None = None
        self._window_start = 0
        self._window = np.empty(0, dtype=np.int64)

    def indices(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the indices of the samples at the positions ``start`` … ``stop - 1``."""
        offset = start - self._window_start
        if not 0 <= offset <= offset + (stop - start) <= len(self._window):
            self._window_start, offset = start, 0
            parts, place, end = [], start, max(stop, start + _WINDOW)
            while place < end:
                epoch, within = divmod(place, self._length)
                count = min(end - place, self._length - within)
                positions = np.arange(within, within + count, dtype=np.int64)
                if self._shuffle:
                    if self._permutation is None or self._permutation[0] != epoch:
                        self._permutation = epoch, Permutation(self._length, seed=self._seed, epoch=epoch)
                    positions = self._permutation[1].take(positions)
                parts.append(positions)
                place += count
            self._window = np.concatenate(parts)
        return self._window[offset : offset + (stop - start)]


class Head(MapDataset):
    """The first ``count`` samples of ``dataset``, or all where there are fewer."""

    def __init__(self, dataset: MapDataset, count: int) -> None:
        self._dataset = dataset
        self._count = min(count, len(dataset))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._dataset[index]

    def fingerprint(self) -> str:
        """Return a digest of the dataset's fingerprint and of the number of samples taken."""
        return digest("head", self._dataset.fingerprint(), self._count)


def first_batches(dataset: MapDataset, limit: int | float, batch_size: int) -> Head:
    """Return the first batches of a dataset: a count, or a share of them, rounded up."""
    batches = limit if isinstance(limit, int) else math.ceil(limit * math.ceil(len(dataset) / batch_size))
    return Head(dataset, batches * batch_size)


def limit_sets(
    sets: Mapping[str, MapDataset | IterableDataset], batches: int, batch_size: int
) -> dict[str, MapDataset | IterableDataset]:
    """Return the first samples of each set, so many batches of all: in proportion to their sizes, of each at least one.

    So a mean over all of them weighs each set as it would without a limit. A stream does not know its size: where one
    is among them, all are left as they are.
    """
    sized = {name: dataset for name, dataset in sets.items() if isinstance(dataset, MapDataset)}
    size, samples = sum(map(len, sized.values())), batches * batch_size
    if len(sized) < len(sets) or size <= samples:
        return dict(sets)
    return {name: Head(dataset, max(1, round(samples * len(dataset) / size))) for name, dataset in sized.items()}


class NoData(DatasetSplits):
    """A :class:`~nxdt_core.protocols.dataset.DatasetSplits` without splits; training on it raises an error that
    explains this."""

    def split(self, name: SplitName) -> MapDataset | IterableDataset | None:
        """Return None for every split."""
        return None
