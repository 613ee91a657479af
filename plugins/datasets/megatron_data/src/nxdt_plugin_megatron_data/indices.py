"""The document, sample and shuffle index of one split of one file: those of Megatron-Core's ``GPTDataset``.

Documents are laid end to end in a random order, and every ``seq_length`` tokens a sample begins. For the same file,
seed and length the three are, number for number, what Megatron-Core builds for one pass (``num_samples=None``), so
that sample i here is sample i there. Where it walks through the documents one by one, this is arithmetic on whole
arrays: sample k begins at token ``k * seq_length``, and a binary search in the running sum of lengths says where
that is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.cache import cached_arrays, is_array


@dataclass(frozen=True, slots=True)
class Indices:
    """Arrays that say which tokens each sample is made of."""

    documents: NDArray[np.int32]
    """[documents] sequences of the file in the order in which they are laid out."""
    samples: NDArray[np.int32 | np.int64]
    """[samples + 1, 2] where each sample begins: a place in ``documents``, and tokens into that sequence. The last
    row is the end of the last sample."""
    shuffle: NDArray[np.uint32 | np.int64]
    """[samples] the sample at each place of the order."""


def count_samples(tokens: int, *, seq_length: int, extra: bool, drop_last: bool) -> int:
    """Samples in a pass over ``tokens``.

    Args:
        tokens: number of tokens in all documents together.
        seq_length: tokens of a sample.
        extra: each sample has one token more than that, for the last label; it is the first of the next sample.
        drop_last: leave out what is left behind the last whole sample.
    """
    available = max(0, tokens - int(extra))
    return available // seq_length if drop_last else -(-available // seq_length)


def build_indices(
    lengths: NDArray[np.int32],
    documents: range,
    *,
    seq_length: int,
    seed: int,
    extra: bool = True,
    drop_last: bool = True,
) -> Indices:
    """Lay out the sequences ``documents`` of a file with ``lengths`` [sequences]; see :func:`count_samples`."""
    random = np.random.RandomState(seed % 2**32)  # whose stream numpy has frozen, and which Megatron-Core takes
    order = np.arange(documents.start, documents.stop, dtype=np.int32)
    random.shuffle(order)
    samples = _starts(lengths, order, seq_length=seq_length, extra=extra, drop_last=drop_last)
    count = len(samples) - 1
    wide = count >= 2**32 - 2
    shuffle = np.arange(count, dtype=np.int64) if wide else np.arange(count, dtype=np.uint32)
    random.shuffle(shuffle)
    return Indices(documents=order, samples=samples, shuffle=shuffle)


def are_indices(
    indices: Indices,
    lengths: NDArray[np.int32],
    documents: range,
    *,
    seq_length: int,
    extra: bool = True,
    drop_last: bool = True,
) -> bool:
    """Return whether ``indices`` have the sequences ``documents`` of a file with ``lengths``, in any order."""
    if not _is_permutation(indices.documents, documents):
        return False
    samples = _starts(lengths, indices.documents, seq_length=seq_length, extra=extra, drop_last=drop_last)
    same = is_array(indices.samples, "i", *samples.shape) and np.array_equal(indices.samples, samples)
    return same and _is_permutation(indices.shuffle, range(len(samples) - 1))


def _is_permutation(order: NDArray[np.integer], of: range) -> bool:
    places = order.astype(np.int64) - of.start
    is_within = 0 <= places.min(initial=0) <= places.max(initial=0) < max(len(of), 1)
    return is_array(order, "iu", len(of)) and is_within and bool((np.bincount(places, minlength=len(of)) == 1).all())


def _starts(
    lengths: NDArray[np.int32], order: NDArray[np.int32], *, seq_length: int, extra: bool, drop_last: bool
) -> NDArray[np.int32 | np.int64]:
    """Return the places at which the samples begin, and at which the last ends.

    A sample that begins with the first token of a document, and shares no token with the one before, is said to begin
    behind the last token of the document before it.
    """
    ends = np.cumsum(lengths[order], dtype=np.int64)
    tokens = int(ends[-1]) if len(ends) else 0
    count = count_samples(tokens, seq_length=seq_length, extra=extra, drop_last=drop_last)
    if not count:
        return np.zeros((1, 2), np.int32)
    at = np.arange(count + 1, dtype=np.int64) * seq_length
    at[-1] = min(at[-1], ends[-1] - int(extra))
    places = np.searchsorted(ends, at, side="right" if extra else "left")
    places[0] = 0  # also where the first documents are empty
    begins = np.where(places > 0, ends[places - 1], 0)
    wide = max(len(ends), int((at - begins).max())) > np.iinfo(np.int32).max
    return np.stack([places, at - begins], axis=1).astype(np.int64 if wide else np.int32)


_log = logging.getLogger("nxdt.data")


def cached_indices(
    directory: Path, name: str, build: Callable[[], Indices], fits: Callable[[Indices], bool]
) -> Indices:
    """Return the index ``name`` of ``directory``, built where it is missing or damaged.

    Where the directory cannot be written, the index stays in the memory of this process, and a warning says so.
    """

    def unkept(error: OSError) -> None:
        reason = error.strerror or str(error)
        _log.warning("%s: cannot keep an index there (%s); each process builds its own", directory, reason)

    return cached_arrays(directory, name, Indices, build, unkept, fits)
