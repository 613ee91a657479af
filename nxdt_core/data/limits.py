"""Fewer data than there are: the first samples of a dataset, the first batches of a validation, and no data at all."""

from __future__ import annotations

import math
from collections.abc import Mapping

from nxdt_core.data.digest import digest
from nxdt_core.protocols.batch import Sample
from nxdt_core.protocols.dataset import DataContext, IterableDataset, MapDataset, SplitName

__all__ = ["Head", "NoData", "first_batches", "limit_sets"]


class Head:
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
    known = {name: dataset for name, dataset in sets.items() if isinstance(dataset, MapDataset)}
    size, samples = sum(map(len, known.values())), batches * batch_size
    if len(known) < len(sets) or size <= samples:
        return dict(sets)
    return {name: Head(dataset, max(1, round(samples * len(dataset) / size))) for name, dataset in known.items()}


class NoData:
    """A :class:`~nxdt_core.protocols.dataset.DatasetSplits` without splits; training on it raises an error that
    explains this."""

    def __init__(self, config: object, context: DataContext) -> None:
        """There is nothing to configure; both are what the kind's call passes."""

    def split(self, name: SplitName) -> MapDataset | IterableDataset | None:
        """Return None for every split."""
        return None
