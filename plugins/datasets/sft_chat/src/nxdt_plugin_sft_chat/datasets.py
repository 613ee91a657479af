"""Conversations as samples of one length: packed, or each with padding behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.digest import digest
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_core.protocols.dataset import DataReport
from nxdt_plugin_sft_chat.chats import Chats

__all__ = ["ChatDataset"]

_PADDING = -1
"""Document number of padding."""


class ChatDataset:
    """A map-style dataset of samples [seq_length].

    Args:
        chats: the conversations.
        samples: numbers of the conversations in each sample; None puts each conversation into its own sample.
        seq_length: tokens of a sample.
        pad_id: token for padding positions; they form a separate document and never have a loss.
        source: digest of everything that determines ``chats``.
        of_records: records of the files where ``chats`` are of the first ones.
    """

    def __init__(
        self,
        chats: Chats,
        samples: Sequence[NDArray[np.int64]] | None,
        *,
        seq_length: int,
        pad_id: int,
        source: str,
        of_records: int | None = None,
    ) -> None:
        self._chats = chats
        self._samples = list(np.arange(len(chats), dtype=np.int64)[:, None]) if samples is None else samples
        self._seq_length = seq_length
        self._pad_id = pad_id
        self._source = source
        self._of_records = of_records

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        length = self._seq_length
        ids = np.full(length, self._pad_id, np.int64)
        labels = np.full(length, IGNORE_INDEX, np.int64)
        positions = np.zeros(length, np.int64)
        documents = np.full(length, _PADDING, np.int64)
        weights = np.zeros(length, np.float32) if len(self._chats.weights) else None
        at = 0
        for number, chat in enumerate(self._samples[index]):
            begin, end = self._chats.starts[chat], self._chats.starts[chat + 1]
            tokens = self._chats.tokens[begin:end].astype(np.int64)
            until = at + len(tokens) - 1
            ids[at:until] = tokens[:-1]
            labels[at:until] = np.where(self._chats.trained[begin + 1 : end], tokens[1:], IGNORE_INDEX)
            if weights is not None:
                weights[at:until] = np.where(
                    self._chats.trained[begin + 1 : end], self._chats.weights[begin + 1 : end], 0
                )
            positions[at:until] = np.arange(until - at)
            documents[at:until] = number
            at = until
        return Sample(
            input_ids=ids, labels=labels, loss_weights=weights, position_ids=positions, document_ids=documents
        )

    def fingerprint(self) -> str:
        """Return a report of the conversations, and of how they are put into samples."""
        sizes = np.array([len(sample) for sample in self._samples], np.int64)
        return digest(self._source, self._seq_length, sizes, np.concatenate(self._samples))

    def report(self) -> DataReport:
        """Return a report of the conversations, and of the places that they fill."""
        filled = int(self._chats.lengths.sum()) - len(self._chats)
        efficiency = filled / (len(self) * self._seq_length)
        return replace(self._chats.report, efficiency=efficiency, of_records=self._of_records)
