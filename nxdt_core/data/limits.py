"""How much of several sets a validation takes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from nxdt_core.data.head import Head
from nxdt_core.protocols.dataset import IterableDataset, MapDataset

__all__ = ["first_batches", "limit_sets"]


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
