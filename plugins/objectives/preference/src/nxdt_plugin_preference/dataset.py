"""Pairs as samples of two rows: chosen answers in one, rejected ones in the other, each behind its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.cache import digest
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_core.protocols.dataset import DataReport
from nxdt_plugin_preference.objectives import PAIR
from nxdt_plugin_preference.pair_arrays import PairArrays

_PADDING = -1
"""Document number of padding."""


class PairDataset:
    """A map-style dataset of samples [2, seq_length].

    ``labels`` are those of prompt and answer; ``loss_weights`` say which are the answer's. Answers of one pair have the
    same document number.

    Args:
        pairs: prompts that have at most ``seq_length`` tokens with either answer.
        packs: numbers of the pairs in each sample, which fit into its rows. None puts each pair into its own sample,
            without document numbers: no token attends to the padding after it.
        seq_length: tokens of a row.
        pad_id: token after the last pair.
        source: digest of the data that the pairs were made from.
        of_records: records of the files where ``pairs`` are of the first ones.
    """

    def __init__(
        self,
        pairs: PairArrays,
        packs: Sequence[NDArray[np.int64]] | None = None,
        *,
        seq_length: int,
        pad_id: int,
        source: str,
        of_records: int | None = None,
    ) -> None:
        self._pairs = pairs
        self._packs = packs
        self._seq_length = seq_length
        self._pad_id = pad_id
        self._source = source
        self._of_records = of_records

    def __len__(self) -> int:
        return len(self._pairs if self._packs is None else self._packs)

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shape = PAIR, self._seq_length
        ids, labels = np.full(shape, self._pad_id, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        weights, positions = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
        documents = np.full(shape, _PADDING, np.int64)
        ends = [0] * PAIR
        for number, place in enumerate([index] if self._packs is None else self._packs[index]):
            prompt, *answers = self._pairs.parts(int(place))
            for row, answer in enumerate(answers):
                begin, end = ends[row], ends[row] + len(prompt) + len(answer)
                tokens = np.concatenate([prompt, answer])
                ids[row, begin:end] = tokens
                labels[row, begin : end - 1] = tokens[1:]
                weights[row, begin + max(0, len(prompt) - 1) : end - 1] = 1
                positions[row, begin:end] = np.arange(end - begin)
                documents[row, begin:end] = number
                ends[row] = end
        packed = self._packs is not None
        return Sample(
            input_ids=ids,
            labels=labels,
            loss_weights=weights,
            position_ids=positions if packed else None,
            document_ids=documents if packed else None,
        )

    def fingerprint(self) -> str:
        """Digest of the records, of how they were rendered, cut and put together, and of the sequence length."""
        return self._source if self._packs is None else digest(self._source, *self._packs)

    def report(self) -> DataReport:
        """Return a report of the pairs, and of the places that they fill."""
        report, places = self._pairs.report, len(self) * PAIR * self._seq_length
        return replace(report, efficiency=report.tokens.tokens / places, of_records=self._of_records)
