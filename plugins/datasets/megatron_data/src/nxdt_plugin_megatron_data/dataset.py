"""Samples of one split of one file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.cache import digest
from nxdt_core.data.packing import Packing
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_plugin_megatron_data.errors import TokenOutsideVocabulary
from nxdt_plugin_megatron_data.indices import Indices
from nxdt_plugin_megatron_data.reader import IndexedTokens

__all__ = ["Cut", "IndexedDataset"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How samples are made of tokens of any file."""

    seq_length: int
    extra: bool
    """Whether a sample takes one token more than that, for its last label."""
    packing: Packing | None
    """What documents in one sample know of each other; None: they are one text, and every label counts."""
    eod_id: int | None
    """The token that ends a document, where it is known: with ``packing``, documents also end there."""
    vocab_size: int | None
    """Ids are below; None does not look."""
    vocab_owner: str = "the model"
    """Description of whose vocabulary it is."""


class IndexedDataset:
    """A map-style dataset; sample i is sample i of Megatron-Core's ``GPTDataset`` for the same indices.

    Args:
        source: the file.
        indices: which of its tokens each sample is made of.
        cut: how.
        content: digest of the file and of what the indices were built by.
    """

    def __init__(self, source: IndexedTokens, indices: Indices, cut: Cut, *, content: str) -> None:
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
        if cut.packing is None:
            return Sample(input_ids=inputs, labels=labels)
        sample = cut.packing.sample(inputs, labels, self._starts(inputs, borders))
        if sample.document_ids is not None:
            sample.document_ids[found:] = -1
        return sample

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
