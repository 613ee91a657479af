"""Several map-style datasets as one: a mixture to train on, a series to validate on."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from nxdt_core.data.digest import digest
from nxdt_core.protocols.batch import Sample
from nxdt_core.protocols.dataloader import MapDataset

__all__ = ["Mixture", "series"]


class Mixture:
    """Samples of several datasets by weight; a pass is long enough that each sample comes at least once.

    The shares of a pass are exact to one sample. A dataset whose share is more than itself is repeated, each sample as
    often as any other of it or once more. The samples of a dataset stand together: the order of the run mixes them.

    Args:
        datasets: by name, none of them empty.
        weights: by the same names, all above 0.
    """

    def __init__(self, datasets: Mapping[str, MapDataset], weights: Mapping[str, float]) -> None:
        total = math.fsum(weights.values())
        longest = max(len(dataset) * total / weights[name] for name, dataset in datasets.items())
        self._datasets = list(datasets.values())
        counts = [max(len(dataset), round(longest * weights[name] / total)) for name, dataset in datasets.items()]
        self._ends = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        dataset = self._datasets[number]
        begin = int(self._ends[number - 1]) if number else 0
        return dataset[(index - begin) % len(dataset)]

    def fingerprint(self) -> str:
        """Digest of the datasets and how many samples of each make a pass."""
        return digest("mixture", *(dataset.fingerprint() for dataset in self._datasets), self._ends)


def series(datasets: Mapping[str, MapDataset]) -> Mixture:
    """The datasets one after the other, each once."""
    return Mixture(datasets, {name: float(len(dataset)) for name, dataset in datasets.items()})
