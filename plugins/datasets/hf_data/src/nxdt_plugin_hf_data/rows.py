"""Columns of Arrow tables, tokens as flat arrays without a copy, and the samples of the model that rows become.

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

from nxdt_core.data.cache import digest
from nxdt_core.data.files.paths import WatchedFiles
from nxdt_core.data.files.tables import first_line
from nxdt_core.data.packing import PackedDataset, Packing
from nxdt_core.data.tokens import TokenStream
from nxdt_core.errors.data import TooFewTokens
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_core.protocols.dataset import MapDataset, SplitName
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_plugin_hf_data.errors import (
    ColumnMissing,
    ColumnsDisagree,
    ColumnUnread,
    DamagedDataset,
    MisfitRows,
    NullValue,
    PaddedDocuments,
    RowTooLong,
    TokenOutOfVocabulary,
    WrongColumnType,
)

_INPUT_IDS, _LABELS, _ATTENTION_MASK, _POSITION_IDS = "input_ids", "labels", "attention_mask", "position_ids"
_UNREAD = {
    **dict.fromkeys(("seq_lengths", "seq_idx", "cu_seq_lens_q"), _POSITION_IDS),
    **dict.fromkeys(("completion_mask", "assistant_masks"), _LABELS),
}
"""Columns that say where documents begin or what is learnt, and the one that is read for it."""


_ROWS = 256
"""Rows that are looked at together."""
_BATCH = 1024
"""Texts that are Python strings at one time."""
_PROBES = 16


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

    def row(self, index: int) -> NDArray[np.integer]:
        """Return the values of one row."""
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]


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

    def row(self, index: int) -> tuple[NDArray[np.integer], NDArray[np.integer] | None, NDArray[np.int64] | None]:
        """Return the tokens of a row, their labels and their documents, as of :meth:`documents`."""
        labels = None if self.labels is None else self.labels.row(index)
        return self.input_ids.row(index), labels, self.documents(index, index + 1)

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
        places = [offsets[:-1][np.diff(offsets) > 0]]
        for begin in range(0, len(self.input_ids), _ROWS):
            numbers = self.documents(begin, min(begin + _ROWS, len(self.input_ids)))
            if numbers is None:
                break
            places.append(offsets[begin] + 1 + np.flatnonzero(np.diff(numbers)))
        return np.unique(np.concatenate(places))

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
    columns = [name for name in (_INPUT_IDS, _LABELS, _ATTENTION_MASK, _POSITION_IDS) if name in names]
    if _INPUT_IDS in columns:
        for column, instead in _UNREAD.items():
            if column in names and instead not in columns:
                raise ColumnUnread(path=path, column=column, instead=instead)
        return columns
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
            tokens, values = len(ids.row(row)), len(other.row(row))
            raise ColumnsDisagree(path=path, row=first + row, column=name, tokens=tokens, found=values)
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
        if pa.types.is_fixed_size_list(kind):
            lengths.append(np.full(len(chunk), kind.list_size, np.int64))
        else:
            lengths.append(np.diff(chunk.offsets.to_numpy(zero_copy_only=True)).astype(np.int64))
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
        raise DamagedDataset(path=path, reason=first_line(error)) from error


def _refuse_nulls(column: pa.ChunkedArray, name: str, path: str, first: int) -> None:
    if column.null_count:
        row = first + int(np.argmax(column.is_null().to_numpy()))
        raise NullValue(path=path, column=name, count=column.null_count, row=row)


class CheckedDataset(MapDataset):
    """The samples of ``dataset``, each looked at when it is read; those at both ends and some between at once.

    Args:
        dataset: whose samples these are.
        vocab_size: rows of the model's vocabulary; None where they are not known.
        path: names the dataset in errors.
        labelled: whether labels are others than the tokens that follow.
        files: in which the samples are mapped.

    Raises:
        TokenOutOfVocabulary: a sample holds a token from there on, or a negative one.
        DataFileChanged: a file has become shorter.
    """

    def __init__(
        self, dataset: MapDataset, vocab_size: int | None, path: str, *, labelled: bool, files: WatchedFiles
    ) -> None:
        self._dataset = dataset
        self._limit = vocab_size
        self._path = path
        self._labelled = labelled
        self._files = files
        if vocab_size is not None and len(dataset):
            for index in np.linspace(0, len(dataset) - 1, _PROBES, dtype=np.int64).tolist():
                self[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int, /) -> Sample:
        self._files.check()
        sample = self._dataset[index]
        labels = sample.labels if self._labelled else sample.labels[-1:]  # the others are inputs, one place on
        for ids in (sample.input_ids, np.where(labels == IGNORE_INDEX, 0, labels)):
            check_ids(ids, self._limit, f"Sample {index} of {self._path}")
        return sample

    def fingerprint(self) -> str:
        """Return the fingerprint of the dataset."""
        return self._dataset.fingerprint()


def check_ids(ids: NDArray[np.integer], limit: int | None, place: str) -> None:
    """Check that all ``ids`` are from 0 to ``limit`` - 1.

    Raises:
        TokenOutOfVocabulary: one is not; it is at ``place``.
    """
    if limit is None or not len(ids):
        return
    lowest, highest = int(ids.min()), int(ids.max())
    if highest >= limit or lowest < 0:
        raise TokenOutOfVocabulary(place=place, token=highest if highest >= limit else lowest, vocab_size=limit)


class RowDataset(MapDataset):
    """A map-style dataset over rows of at most ``seq_length`` + 1 tokens.

    Args:
        columns: names of the dataset's columns.
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
        return row_sample(*self._columns.row(index), seq_length=self._seq_length, packing=self._packing)

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
    inputs, targets = np.zeros(seq_length, np.int64), np.full(seq_length, IGNORE_INDEX, np.int64)
    inputs[: min(count, seq_length)] = ids[:seq_length]
    targets[: max(count - 1, 0)] = (ids if labels is None else labels)[1:]
    if documents is None and count >= seq_length:
        return Sample(input_ids=inputs, labels=targets)
    numbers = np.zeros(seq_length + 1, np.int64)
    numbers[:count] = 1 if documents is None else documents
    apart = numbers if packing.reset_attention_mask else np.minimum(numbers, 1)
    targets[(apart[1:] != apart[:-1]) | (apart[1:] == 0)] = IGNORE_INDEX
    within = numbers[:-1]
    if within.all() and within[0] == within[-1]:
        return Sample(input_ids=inputs, labels=targets)
    positions = np.maximum(np.cumsum(within > 0) - 1, 0)
    if packing.reset_position_ids:
        _, first, which = np.unique(within, return_index=True, return_inverse=True)
        positions -= np.where(within > 0, positions[first][which], 0)
    return Sample(input_ids=inputs, labels=targets, position_ids=positions, document_ids=apart[:-1] - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFraming:
    """The tokenizer of texts and what it puts around each."""

    tokenizer: Tokenizer
    bos_id: int | None
    eos_id: int | None

    def fingerprint(self) -> str:
        """Digest of all that decides the tokens of a text."""
        return digest(self.tokenizer.fingerprint(), self.bos_id, self.eos_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """Settings that make samples of a dataset's tokens."""

    seq_length: int
    vocab_size: int | None
    packs: bool | None
    """``data.packing``."""
    packing: Packing

    def packs_rows_of(self, lengths: NDArray[np.int64], path: str) -> bool:
        """Return whether tokenised rows of these lengths are documents to pack.

        Raises:
            MisfitRows: no setting says it, and they all have one length which is not that of a sample.
        """
        if self.packs is not None:
            return self.packs
        low, high = int(lengths.min()), int(lengths.max())
        if low == high > 0 and len(lengths) > 1 and low not in (self.seq_length, self.seq_length + 1):
            raise MisfitRows(path=path, found=low, seq_length=self.seq_length)
        return low != high or low not in (self.seq_length, self.seq_length + 1)

    def samples(
        self, columns: TokenColumns, *, packs: bool, path: str, source: str, split: SplitName, files: WatchedFiles
    ) -> MapDataset:
        """Return the samples: rows end to end, cut into samples, where ``packs``; else one per row.

        Raises:
            RowTooLong: a row has more tokens than its sample.
            PaddedDocuments: rows that are packed are padded.
            TooFewTokens: they do not make up a sample.
            TokenOutOfVocabulary: one of the samples that are looked at has a token that the model has not.
        """
        dataset: MapDataset
        ids, labels, mask, needed = columns.input_ids, columns.labels, columns.attention_mask, self.seq_length + 1
        if not packs:
            dataset = RowDataset(columns, seq_length=self.seq_length, packing=self.packing, path=path, source=source)
        elif mask is not None and not mask.values.all():
            raise PaddedDocuments(path=path)
        elif len(ids.values) < needed:
            raise TooFewTokens(split=split, found=len(ids.values), needed=needed, seq_length=self.seq_length)
        else:
            dataset = PackedDataset(
                TokenStream(tokens=ids.values, starts=columns.starts()),
                seq_length=self.seq_length,
                packing=self.packing,
                source=source,
                labels=None if labels is None else labels.values,
            )
        return CheckedDataset(dataset, self.vocab_size, path, labelled=labels is not None, files=files)
