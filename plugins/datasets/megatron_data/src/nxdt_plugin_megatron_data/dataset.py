"""Samples of one dataset of Megatron, and blends of several by their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.cache import digest
from nxdt_core.data.packing import Packing
from nxdt_core.data.sampler import Head
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_core.protocols.dataset import MapDataset
from nxdt_plugin_megatron_data.errors import TokenOutsideVocabulary
from nxdt_plugin_megatron_data.indexed_files import IndexedTokens
from nxdt_plugin_megatron_data.indices import Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """Settings that make samples of the tokens of any file."""

    seq_length: int
    extra: bool
    """True if a sample takes one token more than ``seq_length``, for its last label."""
    packing: Packing | None
    """Separation of documents in one sample; None: they are one text, and every label counts."""
    eod_id: int | None
    """The token that ends a document, where it is known: with ``packing``, documents also end there."""
    vocab_size: int | None
    """Ids are below; None does not look."""
    vocab_owner: str = "the model"
    """Description of whose vocabulary it is."""


class IndexedDataset(MapDataset):
    """A map-style dataset; sample i is sample i of Megatron-Core's ``GPTDataset`` for the same indices.

    Args:
        source: the file.
        indices: which of its tokens each sample is made of.
        cut: how.
        content: digest of the file and of what the indices were built by.
    """

    def __init__(self, source: IndexedTokens, indices: Indices, cut: SampleSettings, *, content: str) -> None:
        self._source = source
        self._indices = indices
        self._cut = cut
        self._content = content
        self._window = cut.seq_length + int(cut.extra)

    def __len__(self) -> int:
        return len(self._indices.shuffle)

    def __getitem__(self, index: int, /) -> Sample:
        """Sample ``index``.

        Raises:
            TokenOutsideVocabulary: it holds an id that the model has no row for.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        window, borders, found = self._tokens(index)
        cut = self._cut
        inputs = window[: cut.seq_length]
        labels = window[1:] if cut.extra else np.append(window[1:], IGNORE_INDEX)
        if found < self._window:
            labels = np.where(np.arange(cut.seq_length) < found - 1, labels, IGNORE_INDEX)
        sample = Sample(input_ids=inputs, labels=labels)
        if cut.packing is not None:
            sample = cut.packing.sample(inputs, labels, self._starts(inputs, borders))
        if found >= cut.seq_length:
            return sample
        if sample.document_ids is not None:
            sample.document_ids[found:] = -1
        return replace(sample, padding=np.arange(cut.seq_length) >= found)

    def fingerprint(self) -> str:
        """Digest of the file, the indices' settings and how samples are cut."""
        cut = self._cut
        return digest(self._content, len(self), cut.seq_length, cut.extra, cut.packing, cut.eod_id)

    def _tokens(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Tokens [window], places in them at which another sequence begins, and how many were found."""
        indices, source = self._indices, self._source
        source.check()
        number = int(indices.shuffle[index])
        (first, offset), (last, end) = indices.samples[number : number + 2].tolist()
        sequences = indices.documents[first : last + 1]
        counts = source.lengths[sequences].astype(np.int64)
        begins = source.pointers[sequences] // source.dtype.itemsize
        counts[-1] = end + int(self._cut.extra)
        counts[0] -= offset
        begins[0] += offset
        borders = np.cumsum(counts)
        found = min(int(borders[-1]), self._window)
        window = np.empty(self._window, np.int64)
        at = 0
        for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
            window[at : at + count] = source.tokens(begin, count)
            at += count
        window[found:] = 0
        if self._cut.vocab_size is not None:
            self._check(window, sequences, borders, self._cut.vocab_size)
        return window, borders[:-1], found

    def _check(
        self, window: NDArray[np.int64], sequences: NDArray[np.int32], borders: NDArray[np.int64], vocab_size: int
    ) -> None:
        unsigned = window.view(np.uint64)  # of which a negative token is the largest
        if int(unsigned.max()) >= vocab_size:
            place = int(unsigned.argmax())
            raise TokenOutsideVocabulary(
                path=str(self._source.prefix),
                sequence=int(sequences[np.searchsorted(borders, place, side="right")]),
                token=int(window[place]),
                owner=self._cut.vocab_owner,
                last=vocab_size - 1,
            )

    def _starts(self, inputs: NDArray[np.int64], borders: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places 1 … seq at which documents begin: where sequences do, and behind each end-of-document token."""
        inner = borders[(borders > 0) & (borders <= len(inputs))]
        if self._cut.eod_id is None:
            return inner
        return np.union1d(inner, np.flatnonzero(inputs == self._cut.eod_id) + 1)


_SLOTS = 1 << 20
"""Places of the pattern that a blend repeats: shares are kept to a millionth."""


class BlendedDataset(MapDataset):
    """Samples of several sets such that every stretch of the order has them in the wanted shares.

    A set's places in the pattern are evenly spaced, so that at every point its count is within two samples of its
    share. (Megatron-Core takes the set that is furthest behind, in an index as long as the run; a pattern has no
    length, so that neither a longer run nor a large set with a small weight costs anything.) A pass ends once each set
    was seen whole, the others more than once for it.

    Args:
        datasets: none of them empty.
        shares: of each, with the sum 1.
    """

    def __init__(self, datasets: Sequence[MapDataset], shares: Sequence[float]) -> None:
        self._datasets = datasets
        self._sizes = [len(dataset) for dataset in datasets]
        self._counts = _slots_of_shares(shares)
        times = np.concatenate([(np.arange(count) + 0.5) / count for count in self._counts])
        order = np.argsort(times, kind="stable")
        self._owners = np.repeat(np.arange(len(datasets), dtype=np.int32), self._counts)[order]
        self._ranks = np.concatenate([np.arange(count, dtype=np.int32) for count in self._counts])[order]
        self._length = 1 + max(self._place(which, size - 1) for which, size in enumerate(self._sizes))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> Sample:
        return self.at(index, 0)

    def at(self, index: int, epoch: int) -> Sample:
        """Return the sample at ``index`` in a pass; each pass continues where the one before left each set."""
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        which, number = self.source(index + epoch * self._length)
        return self._datasets[which][number]

    def source(self, place: int) -> tuple[int, int]:
        """Return the set at a place of the order, passes counted through, and the number of its sample."""
        turn, slot = divmod(place, _SLOTS)
        which = int(self._owners[slot])
        number = turn * int(self._counts[which]) + int(self._ranks[slot])
        return which, number % self._sizes[which]

    def fingerprint(self) -> str:
        """Digest of the sets and their shares."""
        return digest(*(dataset.fingerprint() for dataset in self._datasets), self._counts)

    def _place(self, which: int, number: int) -> int:
        """Return the place in the order of a set's sample ``number``, counted over all its passes."""
        turn, rank = divmod(number, int(self._counts[which]))
        slot = np.flatnonzero((self._owners == which) & (self._ranks == rank))[0]
        return turn * _SLOTS + int(slot)


class ChainedDataset(MapDataset):
    """Each sample of each set once, one set behind the other."""

    def __init__(self, datasets: Sequence[MapDataset]) -> None:
        self._datasets = datasets
        self._ends = np.cumsum([len(dataset) for dataset in datasets])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self._datasets[which][index - (int(self._ends[which - 1]) if which else 0)]

    def fingerprint(self) -> str:
        """Digest of the sets in their order."""
        return digest("chained", *(dataset.fingerprint() for dataset in self._datasets))


def in_shares(datasets: Sequence[MapDataset], shares: Sequence[float]) -> list[Head]:
    """Return the first samples of each set: as many as can be had in the wanted shares with none of them twice."""
    most = min(len(dataset) / share for dataset, share in zip(datasets, shares, strict=True))
    return [Head(dataset, max(1, round(most * share))) for dataset, share in zip(datasets, shares, strict=True)]


def _slots_of_shares(shares: Sequence[float]) -> NDArray[np.int64]:
    """Whole numbers of places in proportion to the shares, by largest remainder."""
    exact = np.array(shares) * _SLOTS
    counts: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    missing = _SLOTS - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts
