"""Several data sets as one: by weight, or each sample once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.cache import digest
from nxdt_core.data.sampler import Head
from nxdt_core.protocols.batch import Sample
from nxdt_core.protocols.dataset import MapDataset

__all__ = ["BlendedDataset", "ChainedDataset", "in_shares"]

_SLOTS = 1 << 20
"""Places of the pattern that a blend repeats: shares are kept to a millionth."""


class BlendedDataset:
    """Samples of several sets such that every stretch of the order has them in the wanted shares.

    A set's places in the pattern are evenly spaced, so that at every point its count is within two samples of its
    share. (Megatron-Core takes the set that is furthest behind, in an index as long as the run; a pattern has no
    length, so that neither a longer run nor a large set with a small weight costs anything.) A pass ends once each set
    was seen whole, the others more than once for it.

    Args:
        datasets: none of them empty.
        shares: of each, with the sum 1.
    """

    def __init__(self, datasets: Sequence[MapDataset], shares: Sequence[float]) -> None:
        self._datasets = datasets
        self._sizes = [len(dataset) for dataset in datasets]
        self._counts = _places(shares)
        times = np.concatenate([(np.arange(count) + 0.5) / count for count in self._counts])
        order = np.argsort(times, kind="stable")
        self._owners = np.repeat(np.arange(len(datasets), dtype=np.int32), self._counts)[order]
        self._ranks = np.concatenate([np.arange(count, dtype=np.int32) for count in self._counts])[order]
        self._length = 1 + max(self._place(which, size - 1) for which, size in enumerate(self._sizes))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> Sample:
        return self.at(index, 0)

    def at(self, index: int, epoch: int) -> Sample:
        """Return the sample at ``index`` in a pass; each pass continues where the one before left each set."""
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        which, number = self.source(index + epoch * self._length)
        return self._datasets[which][number]

    def source(self, place: int) -> tuple[int, int]:
        """Return the set at a place of the order, passes counted through, and the number of its sample."""
        turn, slot = divmod(place, _SLOTS)
        which = int(self._owners[slot])
        number = turn * int(self._counts[which]) + int(self._ranks[slot])
        return which, number % self._sizes[which]

    def fingerprint(self) -> str:
        """Digest of the sets and their shares."""
        return digest(*(dataset.fingerprint() for dataset in self._datasets), self._counts)

    def _place(self, which: int, number: int) -> int:
        """Return the place in the order of a set's sample ``number``, counted over all its passes."""
        turn, rank = divmod(number, int(self._counts[which]))
        slot = np.flatnonzero((self._owners == which) & (self._ranks == rank))[0]
        return turn * _SLOTS + int(slot)


class ChainedDataset:
    """Each sample of each set once, one set behind the other."""

    def __init__(self, datasets: Sequence[MapDataset]) -> None:
        self._datasets = datasets
        self._ends = np.cumsum([len(dataset) for dataset in datasets])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self._datasets[which][index - (int(self._ends[which - 1]) if which else 0)]

    def fingerprint(self) -> str:
        """Digest of the sets in their order."""
        return digest("chained", *(dataset.fingerprint() for dataset in self._datasets))


def in_shares(datasets: Sequence[MapDataset], shares: Sequence[float]) -> list[Head]:
    """Return the first samples of each set: as many as can be had in the wanted shares with none of them twice."""
    most = min(len(dataset) / share for dataset, share in zip(datasets, shares, strict=True))
    return [Head(dataset, max(1, round(most * share))) for dataset, share in zip(datasets, shares, strict=True)]


def _places(shares: Sequence[float]) -> NDArray[np.int64]:
    """Whole numbers of places in proportion to the shares, by largest remainder."""
    exact = np.array(shares) * _SLOTS
    counts: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    missing = _SLOTS - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts
