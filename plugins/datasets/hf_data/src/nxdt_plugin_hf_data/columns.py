"""Columns of Arrow tables: tokens as flat arrays without a copy, texts one batch after the other.

Memory-mapped tables stay on the disk: what is kept here of a row is where its tokens begin.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nxdt_core.data.tokens import TokenStream
from nxdt_core.protocols.batch import IGNORE_INDEX
from nxdt_plugin_hf_data.errors import (
    ColumnMissing,
    ColumnsDisagree,
    ColumnUnread,
    DamagedDataset,
    NullValue,
    WrongColumnType,
)

_INPUT_IDS, _LABELS, _ATTENTION_MASK, _POSITION_IDS = "input_ids", "labels", "attention_mask", "position_ids"
_UNREAD = {
    **dict.fromkeys(("seq_lengths", "seq_idx", "cu_seq_lens_q"), _POSITION_IDS),
    **dict.fromkeys(("completion_mask", "assistant_masks"), _LABELS),
}
"""Columns that say where documents begin or what is learnt, and the one that is read for it."""


class Chunks:
    """Arrays end to end, sliced like one; a slice within one of them is a view."""

    def __init__(self, arrays: list[NDArray[np.integer]]) -> None:
        self._arrays = [array for array in arrays if len(array)] or [np.empty(0, np.int64)]
        self._ends = list(accumulate(len(array) for array in self._arrays))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, places: slice, /) -> NDArray[np.integer]:
        begin, end, _ = places.indices(self._ends[-1])
        first = min(bisect_right(self._ends, begin), len(self._ends) - 1)
        before = self._ends[first - 1] if first else 0
        head = self._arrays[first][begin - before : max(begin, end) - before]
        if end <= self._ends[first]:
            return head
        last = bisect_left(self._ends, end)
        tail = self._arrays[last][: end - self._ends[last - 1]]
        return np.concatenate([head, *self._arrays[first + 1 : last], tail])

    def all(self) -> bool:
        """Return whether none of the values is 0."""
        return all(array.all() for array in self._arrays if len(array))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumn:
    """A column with a list of integers a row."""

    values: Chunks
    """[tokens] of all rows, in their order."""
    offsets: NDArray[np.int64]
    """[rows + 1] where each row begins in them, and the end."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of_stream(cls, stream: TokenStream) -> TokenColumn:
        """Return the documents of a stream as rows."""
        tokens = stream.tokens[:]
        return cls(values=Chunks([tokens]), offsets=np.append(stream.starts, len(tokens)))

    def row(self, index: int) -> NDArray[np.integer]:
        """Return the values of one row."""
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]


_ROWS = 256
"""Rows that are looked at together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumns:
    """Columns of a tokenised dataset, with a value per token."""

    input_ids: TokenColumn
    labels: TokenColumn | None = None
    """Labels of the same token, not of the next; −100 where it is not learnt. None: every token is."""
    attention_mask: TokenColumn | None = None
    """0 for padding; documents of a row have different numbers, such as 1 and 2. None: there is no padding."""
    position_ids: TokenColumn | None = None
    """Positions of tokens; where they do not count on, another document begins. None: each row is one document."""

    def learnt(self, begin: int, end: int) -> NDArray[np.bool_]:
        """Return, for each token of the rows from ``begin`` to ``end``, whether it has a label and is not padding."""
        places = slice(*self.input_ids.offsets[[begin, end]].tolist())
        learnt = np.ones(places.stop - places.start, bool)
        if self.labels is not None:
            learnt &= self.labels.values[places] != IGNORE_INDEX
        if self.attention_mask is not None:
            learnt &= self.attention_mask.values[places] != 0
        return learnt

    def documents(self, begin: int, end: int) -> NDArray[np.int64] | None:
        """Return the number of each token's document in the rows from ``begin`` to ``end``, from 1, and 0 for padding.

        None where no column says it: each row is a document.
        """
        if self.attention_mask is None and self.position_ids is None:
            return None
        places = slice(*self.input_ids.offsets[[begin, end]].tolist())
        numbers = np.ones(places.stop - places.start, np.int64)
        if self.attention_mask is not None:
            numbers[:] = self.attention_mask.values[places]
        real = np.flatnonzero(numbers)
        begins = np.diff(numbers[real], prepend=0) != 0
        if self.position_ids is not None:
            begins[1:] |= np.diff(self.position_ids.values[places].astype(np.int64)[real]) != 1
        numbers[real] = np.cumsum(begins)
        return numbers

    def starts(self) -> NDArray[np.int64]:
        """Return the places of all tokens with which documents begin, ascending: in rows, and at their beginnings."""
        offsets = self.input_ids.offsets
        found = [offsets[:-1][np.diff(offsets) > 0]]
        for begin in range(0, len(self.input_ids), _ROWS):
            numbers = self.documents(begin, min(begin + _ROWS, len(self.input_ids)))
            if numbers is None:
                break
            found.append(offsets[begin] + 1 + np.flatnonzero(np.diff(numbers)))
        return np.unique(np.concatenate(found))

    def teach(self) -> bool:
        """Return whether any token of the rows is trained on.

        The label of a row's first token does not count, because no token precedes it.
        """
        offsets = self.input_ids.offsets
        if self.labels is None and self.attention_mask is None:
            return bool(offsets[-1])
        for begin in range(0, len(self.input_ids), _ROWS):
            end = min(begin + _ROWS, len(self.input_ids))
            learnt = self.learnt(begin, end)
            starts = offsets[begin:end][np.diff(offsets[begin : end + 1]) > 0]
            learnt[starts - offsets[begin]] = False
            if learnt.any():
                return True
        return False


def chosen(names: Sequence[str], text_key: str, path: str) -> list[str]:
    """Return the columns that are read: those of tokens, or where there are none, the text.

    Raises:
        ColumnMissing: there is no text either.
        ColumnUnread: documents or what is learnt are in columns that are not read.
    """
    found = [name for name in (_INPUT_IDS, _LABELS, _ATTENTION_MASK, _POSITION_IDS) if name in names]
    if _INPUT_IDS in found:
        for column, instead in _UNREAD.items():
            if column in names and instead not in found:
                raise ColumnUnread(path=path, column=column, instead=instead)
        return found
    if text_key not in names:
        raise ColumnMissing(path=path, text_key=text_key, columns=tuple(names))
    return [text_key]


def is_tokenised(table: pa.Table) -> bool:
    """Return whether the rows have tokens."""
    return _INPUT_IDS in table.column_names


def token_columns(table: pa.Table, path: str, first: int = 0) -> TokenColumns:
    """Return the columns of a tokenised dataset, of which the table has the rows from ``first`` on.

    Raises:
        WrongColumnType, NullValue: a column has no list of integers in each row.
        ColumnsDisagree: lists of one row differ in length.
    """
    columns = {
        name: _token_column(table.column(name), name, path, first)
        for name in (_INPUT_IDS, _LABELS, _ATTENTION_MASK, _POSITION_IDS)
        if name in table.column_names
    }
    ids = columns[_INPUT_IDS]
    for name, other in columns.items():
        if not np.array_equal(other.offsets, ids.offsets):
            row = int(np.argmax(np.diff(other.offsets) != np.diff(ids.offsets)))
            tokens, found = len(ids.row(row)), len(other.row(row))
            raise ColumnsDisagree(path=path, row=first + row, column=name, tokens=tokens, found=found)
    return TokenColumns(**columns)


def text_column(table: pa.Table, text_key: str, path: str, first: int = 0) -> Iterator[str]:
    """Yield the texts of a dataset, of which the table has the rows from ``first`` on.

    Raises:
        WrongColumnType, NullValue: a row has no text.
    """
    column = table.column(text_key)
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise WrongColumnType(path=path, column=text_key, found=str(column.type), wanted="text")
    _refuse_nulls(column, text_key, path, first)
    for batch in column.chunks:
        for begin in range(0, len(batch), _BATCH):
            part = batch.slice(begin, _BATCH)
            _validate(part, path, full=True)
            yield from part.to_pylist()


_BATCH = 1024
"""Texts that are Python strings at one time."""


def _token_column(column: pa.ChunkedArray, name: str, path: str, first: int) -> TokenColumn:
    kind = column.type
    if pa.types.is_list(kind) and pa.types.is_null(kind.value_type):  # JSON of which no row has a token
        kind = pa.list_(pa.int64())
        column = column.cast(kind)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not pa.types.is_integer(kind.value_type):
        raise WrongColumnType(path=path, column=name, found=str(kind), wanted="a list of integers in each row")
    _refuse_nulls(column, name, path, first)
    arrays, lengths = [], []
    for chunk in column.chunks:
        _validate(chunk, path)
        lengths.append(_lengths(chunk))
        if lengths[-1].min(initial=0) < 0:
            raise DamagedDataset(path=path, reason=f"lists of column {name!r} have negative lengths")
        values = chunk.flatten()
        if values.null_count:
            within = np.searchsorted(np.cumsum(lengths[-1]), int(np.argmax(values.is_null())), side="right")
            row = first + sum(map(len, lengths[:-1])) + int(within)
            raise NullValue(path=path, column=name, count=values.null_count, row=row)
        arrays.append(values.to_numpy(zero_copy_only=True))
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]) if lengths else np.zeros(1)
    return TokenColumn(values=Chunks(arrays), offsets=offsets.astype(np.int64))


def _validate(chunk: pa.Array, path: str, *, full: bool = False) -> None:
    """See that offsets and sizes of an array, which a file says, lead to places in its buffers: Arrow takes them on
    trust. Without ``full`` only the ends are looked at, which touches no data.

    Raises:
        DamagedDataset: they do not.
    """
    try:
        chunk.validate(full=full)
    except pa.ArrowException as error:
        raise DamagedDataset(path=path, reason=str(error).partition("\n")[0].rstrip(".")) from error


def _lengths(chunk: pa.Array) -> NDArray[np.int64]:
    if pa.types.is_fixed_size_list(chunk.type):
        return np.full(len(chunk), chunk.type.list_size, np.int64)
    offsets: NDArray[np.integer] = chunk.offsets.to_numpy(zero_copy_only=True)
    return np.diff(offsets).astype(np.int64)


def _refuse_nulls(column: pa.ChunkedArray, name: str, path: str, first: int) -> None:
    if column.null_count:
        row = first + int(np.argmax(column.is_null().to_numpy()))
        raise NullValue(path=path, column=name, count=column.null_count, row=row)
