"""Items of different lengths into bins of one capacity, with little room left over."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.sampler import Permutation

__all__ = ["drawn_bins", "first_fit_decreasing", "first_fit_in_rows"]


def drawn_bins(lengths: NDArray[np.int64], capacity: int, *, seed: int) -> list[NDArray[np.int64]]:
    """Return the bins of items by first-fit decreasing, where ``seed`` draws which of several equally long ones shares
    a bin with which others: neighbours in a file are often similar.

    The bins are in the order of their first items, and so are the items of a bin: without shuffling a run reads them
    in about the order of the files, and not the fullest or longest first.

    Args:
        lengths: [items], or [items, rows] of bins of several rows.
        capacity: of a bin, or of each of its rows.
        seed: of the run.
    """
    if not len(lengths):
        return []
    drawn = Permutation(len(lengths), seed=seed, epoch=0).take(np.arange(len(lengths), dtype=np.int64))
    fit = first_fit_decreasing if lengths.ndim == 1 else first_fit_in_rows
    bins = [np.sort(drawn[places]) for places in fit(lengths[drawn], capacity)]
    return sorted(bins, key=lambda items: int(items[0]))


def first_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> list[NDArray[np.int64]]:
    """Return the bins of items, each the indices of its items, longest first; items of one length keep their order.

    First-fit decreasing: each item, the longest first, goes into the first bin that has room for it. It takes at most
    11/9 of the fewest possible bins and 6/9 of one more (Dósa 2007). Items of one length are placed together, so
    that it takes a pass over the bins for each different length, not for each item.

    Args:
        lengths: [items], each from 1 to ``capacity``.
        capacity: of a bin.

    Raises:
        ValueError: an item is longer than a bin, or has no length.
    """
    _check(lengths, capacity)
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
    return _grouped(items, bin_of, len(room))


def first_fit_in_rows(lengths: NDArray[np.int64], capacity: int) -> list[NDArray[np.int64]]:
    """Return the same for bins of several rows, where an item has a separate length in each row.

    The item with the largest total length goes first. Pairs of answers to one prompt fill 95 % of the places, compared
    with 83 % in bins for the longest of an item's lengths. It takes a pass over the bins for each item.

    Args:
        lengths: [items, rows], each from 1 to ``capacity``.
        capacity: of a row.

    Raises:
        ValueError: an item is longer than a row, or has no length.
    """
    _check(lengths, capacity)
    items = np.argsort(-lengths.sum(axis=1), kind="stable")
    bin_of = np.empty(len(lengths), np.int64)
    room = np.full(lengths.shape[::-1], capacity)
    count = 0
    for item in items:
        fits = (room[:, :count] >= lengths[item, :, None]).all(axis=0)
        first = int(fits.argmax()) if fits.any() else count
        bin_of[item] = first
        room[:, first] -= lengths[item]
        count = max(count, first + 1)
    return _grouped(items, bin_of, count)


def _check(lengths: NDArray[np.int64], capacity: int) -> None:
    if lengths.size and not 0 < lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"lengths must be between 1 and {capacity}, not {lengths.min()} and {lengths.max()}")


def _grouped(items: NDArray[np.int64], bin_of: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """The items of each of ``count`` bins, in the order of ``items``."""
    sizes = np.bincount(bin_of, minlength=count)
    return np.split(items[np.argsort(bin_of[items], kind="stable")], np.cumsum(sizes)[:-1]) if count else []
