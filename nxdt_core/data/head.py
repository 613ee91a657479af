"""The first samples of a dataset."""

from __future__ import annotations

from nxdt_core.data.digest import digest
from nxdt_core.protocols.batch import Sample
from nxdt_core.protocols.dataset import MapDataset

__all__ = ["Head"]


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
