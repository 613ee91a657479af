"""Each row a sample: tokens that were cut to the length of the run, or records that are padded to it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.cache import digest
from nxdt_core.data.packing import Packing
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_plugin_hf_data.columns import TokenColumns
from nxdt_plugin_hf_data.errors import RowTooLong

__all__ = ["RowDataset", "row_sample"]


class RowDataset:
    """A map-style dataset over rows of at most ``seq_length`` + 1 tokens.

    Args:
        columns: of the dataset.
        seq_length: tokens of a sample.
        packing: how documents of a row affect each other.
        path: names the dataset in errors.
        source: digest of the dataset.

    Raises:
        RowTooLong: a row has more tokens.
    """

    def __init__(self, columns: TokenColumns, *, seq_length: int, packing: Packing, path: str, source: str) -> None:
        lengths = np.diff(columns.input_ids.offsets)
        if lengths.max(initial=0) > seq_length + 1:
            row = int(np.argmax(lengths > seq_length + 1))
            raise RowTooLong(path=path, row=row, found=int(lengths[row]), seq_length=seq_length)
        self._columns = columns
        self._seq_length = seq_length
        self._packing = packing
        self._source = source

    def __len__(self) -> int:
        return len(self._columns.input_ids)

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        columns = self._columns
        return row_sample(
            columns.input_ids.row(index),
            None if columns.labels is None else columns.labels.row(index),
            columns.documents(index, index + 1),
            seq_length=self._seq_length,
            packing=self._packing,
        )

    def fingerprint(self) -> str:
        """Digest of the source and the sequence length, and of what differs from the default packing."""
        resets = (self._packing.reset_attention_mask, self._packing.reset_position_ids)
        return digest("rows", self._source, self._seq_length, *(() if all(resets) else resets))


def row_sample(
    ids: NDArray[np.integer],
    labels: NDArray[np.integer] | None,
    documents: NDArray[np.int64] | None,
    *,
    seq_length: int,
    packing: Packing,
) -> Sample:
    """Return a sample of one row's columns, each of at most ``seq_length`` + 1 tokens.

    Labels of a row are at their own token, as transformers has them, and move to the token before. What a row is
    short of is padding: token 0, seen by nothing and without a label. ``documents`` are those of
    :meth:`TokenColumns.documents`.
    """
    count = len(ids)
    if documents is None and count >= seq_length:
        return _whole(ids, ids if labels is None else labels, seq_length)
    inputs = np.zeros(seq_length, np.int64)
    inputs[: min(count, seq_length)] = ids[:seq_length]
    numbers = np.zeros(seq_length + 1, np.int64)
    numbers[:count] = 1 if documents is None else documents
    apart = numbers if packing.reset_attention_mask else np.minimum(numbers, 1)
    targets = np.full(seq_length, IGNORE_INDEX, np.int64)
    targets[: max(count - 1, 0)] = (ids if labels is None else labels)[1:]
    targets[(apart[1:] != apart[:-1]) | (apart[1:] == 0)] = IGNORE_INDEX
    within = numbers[:-1]
    if within.all() and within[0] == within[-1]:
        return Sample(input_ids=inputs, labels=targets)
    positions = np.maximum(np.cumsum(within > 0) - 1, 0)
    if packing.reset_position_ids:
        _, first, which = np.unique(within, return_index=True, return_inverse=True)
        positions -= np.where(within > 0, positions[first][which], 0)
    return Sample(input_ids=inputs, labels=targets, position_ids=positions, document_ids=apart[:-1] - 1)


def _whole(ids: NDArray[np.integer], labels: NDArray[np.integer], seq_length: int) -> Sample:
    """A sample of a row that has no padding."""
    targets = np.empty(seq_length, np.int64)
    targets[-1] = IGNORE_INDEX
    targets[: len(labels) - 1] = labels[1:]
    return Sample(input_ids=ids[:seq_length].astype(np.int64), labels=targets)
