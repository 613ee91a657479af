"""Pairs as samples of two rows: the chosen answer and the rejected one, each behind its prompt and padded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_plugin_preference.rendering import Pair

__all__ = ["PairDataset"]


class PairDataset:
    """A map-style dataset of pairs.

    ``labels`` are those of prompt and answer; ``loss_weights`` say which are the answer's.

    Args:
        pairs: prompts that have at most ``seq_length`` tokens with either answer.
        seq_length: tokens of a row.
        pad_id: of the tokens behind a pair, which nothing sees.
        source: digest of what the pairs were made of.
    """

    def __init__(self, pairs: Sequence[Pair], *, seq_length: int, pad_id: int, source: str) -> None:
        self._pairs = pairs
        self._seq_length = seq_length
        self._pad_id = pad_id
        self._source = source

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int, /) -> Sample:
        pair = self._pairs[index]
        rows = [self._row(pair.prompt, answer) for answer in (pair.chosen, pair.rejected)]
        ids, labels, weights = (np.stack(arrays) for arrays in zip(*rows, strict=True))
        return Sample(input_ids=ids, labels=labels, loss_weights=weights)

    def fingerprint(self) -> str:
        """Digest of the records, of how they were rendered and cut, and of the sequence length."""
        return self._source

    def _row(
        self, prompt: list[int], answer: list[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        tokens = np.array([*prompt, *answer], dtype=np.int64)
        ids = np.full(self._seq_length, self._pad_id, dtype=np.int64)
        labels = np.full(self._seq_length, IGNORE_INDEX, dtype=np.int64)
        weights = np.zeros(self._seq_length, dtype=np.float32)
        ids[: len(tokens)] = tokens
        labels[: len(tokens) - 1] = tokens[1:]
        weights[max(0, len(prompt) - 1) : len(tokens) - 1] = 1
        return ids, labels, weights
