"""Items of different lengths into bins of one capacity, with little room left over."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["first_fit_decreasing"]


def first_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> list[NDArray[np.int64]]:
    """Bins of items, each the indices of its items, longest first; items of one length keep their order.

    First-fit decreasing: each item, the longest first, goes into the first bin that has room for it. It takes at most
    11/9 of the fewest possible bins and 6/9 of one more (Dósa 2007). Items of one length are placed together, so
    that it takes a pass over the bins for each different length, not for each item.

    Args:
        lengths: [items], each from 1 to ``capacity``.
        capacity: of a bin.

    Raises:
        ValueError: an item is longer than a bin, or has no length.
    """
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"lengths must lie between 1 and {capacity}, not {lengths.min()} and {lengths.max()}")
    items = np.argsort(-lengths, kind="stable")
    bin_of = np.empty(len(lengths), np.int64)
    room = np.empty(0, np.int64)
    placed = 0
    for negative, count in zip(*np.unique(-lengths, return_counts=True), strict=True):
        length = -int(negative)
        fits = room // length
        missing = int(count - fits.sum())
        if missing > 0:
            fresh = -(-missing // (capacity // length))
            room = np.concatenate([room, np.full(fresh, capacity)])
            fits = np.concatenate([fits, np.full(fresh, capacity // length)])
        taken = np.diff(np.minimum(np.cumsum(fits), count), prepend=0)
        bin_of[items[placed : placed + count]] = np.repeat(np.arange(len(room)), taken)
        room -= taken * length
        placed += int(count)
    sizes = np.bincount(bin_of, minlength=len(room))
    return np.split(items[np.argsort(bin_of[items], kind="stable")], np.cumsum(sizes)[:-1]) if len(room) else []
