"""Several map-style datasets as one to train on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from nxdt_core.data.cache import digest
from nxdt_core.errors.data import MixtureInSequence
from nxdt_core.protocols.batch import Sample
from nxdt_core.protocols.dataset import MapDataset


def mixed(datasets: Mapping[str, MapDataset], weights: Mapping[str, float], *, shuffle: bool) -> MapDataset:
    """Return the mixture of named datasets by weight; of one, the dataset itself.

    Raises:
        MixtureInSequence: there are several, and the run takes samples in their order.
    """
    if len(datasets) == 1:
        return next(iter(datasets.values()))
    if not shuffle:
        raise MixtureInSequence(sources=tuple(datasets))
    return Mixture(list(datasets.values()), [weights[name] for name in datasets])


class Mixture(MapDataset):
    """Samples of several datasets by weight; a pass is long enough to include each sample at least once.

    The shares of a pass are exact to one sample. A dataset whose share exceeds its size is repeated. Over all passes,
    each of its samples occurs as often as any other, or once more. The samples of a dataset are contiguous; the run's
    order mixes them.

    Args:
        datasets: none of them empty.
        weights: weight of each dataset, above 0.
    """

    def __init__(self, datasets: Sequence[MapDataset], weights: Sequence[float]) -> None:
        total = math.fsum(weights)
        lengths = [len(dataset) for dataset in datasets]
        longest = max(length * total / weight for length, weight in zip(lengths, weights, strict=True))
        self._datasets = datasets
        self._ends = np.cumsum(
            [max(length, round(longest * weight / total)) for length, weight in zip(lengths, weights, strict=True)],
            dtype=np.int64,
        )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int, /) -> Sample:
        return self.at(index, 0)

    def at(self, index: int, epoch: int) -> Sample:
        """Yield samples; a pass that repeats a part of a dataset begins where the one before it has ended."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        begin = int(self._ends[number - 1]) if number else 0
        dataset, count = self._datasets[number], int(self._ends[number]) - begin
        return dataset[(epoch * count + index - begin) % len(dataset)]

    def fingerprint(self) -> str:
        """Digest of the datasets and how many samples of each make a pass."""
        return digest("mixture", *(dataset.fingerprint() for dataset in self._datasets), self._ends)
