"""The order of the samples of a run: a pure function of (length, seed, position).

Position p counts samples from the start of the run over all ranks and epochs. It does not depend on ranks,
micro-batches or workers, which is why a run may be resumed in another layout.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.permutation import Permutation
from nxdt_core.errors.data import EmptyDataset

__all__ = ["GlobalOrder"]

_WINDOW = 4096
"""Positions computed together: spreads numpy's cost per call over many small batches."""


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
            self._window = self._compute(start, max(stop, start + _WINDOW))
        return self._window[offset : offset + (stop - start)]

    def _compute(self, start: int, stop: int) -> NDArray[np.int64]:
        parts = []
        while start < stop:
            epoch, within = divmod(start, self._length)
            count = min(stop - start, self._length - within)
            positions = np.arange(within, within + count, dtype=np.int64)
            if self._shuffle:
                positions = self._epoch(epoch).take(positions)
            parts.append(positions)
            start += count
        return np.concatenate(parts)

    def _epoch(self, epoch: int) -> Permutation:
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = epoch, Permutation(self._length, seed=self._seed, epoch=epoch)
        return self._permutation[1]
