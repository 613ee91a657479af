"""Made-up tokens, by index."""

from __future__ import annotations

import numpy as np

from nxdt_core.protocols.batch import Sample
from nxdt_core.protocols.dataset import DataContext, MapDataset, SplitName

__all__ = ["Tokens"]

_COUNT, _VOCABULARY, _PERIOD = 64, 64, 7


class Tokens:
    """A :class:`~nxdt_core.protocols.dataset.DatasetSplits` of sequences that repeat."""

    def __init__(self, config: object, context: DataContext) -> None:
        self._length = context.seq_length

    def split(self, name: SplitName) -> MapDataset | None:
        """Return the samples of training and validation."""
        return None if name == "test" else _Repeating(self._length, 0 if name == "train" else _COUNT)


class _Repeating:
    def __init__(self, length: int, first: int) -> None:
        self._length, self._first = length, first

    def __len__(self) -> int:
        return _COUNT

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < _COUNT:
            raise IndexError(index)
        tokens = (self._first + index + np.arange(self._length + 1) % _PERIOD) % _VOCABULARY
        return Sample(input_ids=tokens[:-1], labels=tokens[1:])

    def fingerprint(self) -> str:
        return f"repeating from {self._first}"
