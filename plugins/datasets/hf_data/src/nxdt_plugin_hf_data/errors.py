"""Errors of datasets: codes ``NXDT-D200`` to ``NXDT-D219``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import listing

__all__ = [
    "CacheUnwritable",
    "ColumnMissing",
    "ColumnUnread",
    "ColumnsDiffer",
    "ColumnsDisagree",
    "DamagedDataset",
    "EmptyData",
    "MisfitRows",
    "MixtureInSequence",
    "NoDataset",
    "NothingToLearn",
    "NullValue",
    "PaddedDocuments",
    "RowTooLong",
    "RowsDiffer",
    "SplitMissing",
    "SplitUnclear",
    "TokenOutOfVocabulary",
    "UnknownDataFormat",
    "WrongColumnType",
]


class NoDataset(NxdtError):
    """A path that is not a dataset of the datasets library."""

    code = "NXDT-D200"
    happened = "{key}: {path} is not a dataset as datasets' save_to_disk writes it: {found}."
    remedy = "{advice}"
    usual_remedy = "Name the directory that was given to save_to_disk."
    key: str
    path: str
    found: str
    advice: str = "Name the directory that was given to save_to_disk."


class DamagedDataset(NxdtError):
    """Files of a dataset that Arrow or the datasets library refuses."""

    code = "NXDT-D201"
    happened = "{path} cannot be read: {reason}."
    remedy = "Copy or make it again; an aborted copy looks like this."
    path: str
    reason: str


class SplitMissing(NxdtError):
    """A directory with several splits, none of them the one that is wanted."""

    code = "NXDT-D202"
    happened = "{key}: {path} holds the splits {names}, and none called {wanted!r}."
    remedy = "{advice}"
    usual_remedy = "Name a split that the dataset has."
    key: str
    path: str
    wanted: str
    splits: tuple[str, ...]
    advice: str

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "names": listing(self.splits)}


class ColumnMissing(NxdtError):
    """A dataset without tokens and without text."""

    code = "NXDT-D203"
    happened = "{path} has neither a column 'input_ids' nor the text column {text_key!r}; it has {names}."
    remedy = "Set data.text_key to the column that holds the text, or tokenise the dataset into 'input_ids'."
    path: str
    text_key: str
    columns: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "names": listing(self.columns) or "none"}


class WrongColumnType(NxdtError):
    """A column whose values are of another type."""

    code = "NXDT-D204"
    happened = "Column {column!r} of {path} is of type {found}; it must be {wanted}."
    remedy = "Correct the column, for example with datasets' cast_column, and save the dataset again."
    path: str
    column: str
    found: str
    wanted: str


class NullValue(NxdtError):
    """A row without a value."""

    code = "NXDT-D205"
    happened = "Column {column!r} of {path} lacks a value in {count} places, the first of them in row {row}."
    remedy = "Filter such rows out and save the dataset again."
    path: str
    column: str
    count: int
    row: int


class ColumnsDisagree(NxdtError):
    """Columns whose lists have different lengths in one row."""

    code = "NXDT-D206"
    happened = "Row {row} of {path} has {tokens} input_ids and {found} {column}."
    remedy = "Both need one value a token; make the column again, or remove it."
    path: str
    row: int
    column: str
    tokens: int
    found: int


class MisfitRows(NxdtError):
    """Tokens that were cut to another length than the run's."""

    code = "NXDT-D207"
    happened = "Each row of {path} has {found} tokens; a sample of this run has {seq_length}."
    remedy = "Set data.seq_length to {found}, or data.packing to true to pack the rows into samples."
    path: str
    found: int
    seq_length: int


class RowTooLong(NxdtError):
    """A row that does not fit a sample."""

    code = "NXDT-D208"
    happened = "Row {row} of {path} has {found} tokens; a sample has {seq_length}, and data.packing is false."
    remedy = "Raise data.seq_length, shorten the row, or set data.packing to true. Nothing is truncated silently."
    path: str
    row: int
    found: int
    seq_length: int


class PaddedDocuments(NxdtError):
    """Rows with padding that are to be packed."""

    code = "NXDT-D209"
    happened = "Rows of {path} are padded (its attention_mask has zeros), and they are to be packed."
    remedy = "Set data.packing to false, or save the dataset without padding."
    path: str


class TokenOutOfVocabulary(NxdtError):
    """A token that the model has no row for."""

    code = "NXDT-D210"
    happened = "{place} has the token {token}; the model's vocabulary has {vocab_size} rows."
    remedy = "Set model.vocab_size to what the dataset's tokenizer has, or tokenise it with this model's tokenizer."
    place: str
    token: int
    vocab_size: int


class UnknownDataFormat(NxdtError):
    """A file of a format that streams do not read."""

    code = "NXDT-D211"
    happened = "{key}: {path} is of no format that is read here."
    remedy = "Files end in {known}; of a directory, those are taken."
    key: str
    path: str
    known: str


class MixtureInSequence(NxdtError):
    """Several training sources whose samples are not to be drawn at random."""

    code = "NXDT-D212"
    happened = "Sources {names} are mixed by drawing samples at random, and data.shuffle is false."
    remedy = "Set data.shuffle to true, or data.streaming to true, which interleaves the sources in their order."
    sources: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "names": listing(self.sources)}


class CacheUnwritable(NxdtError):
    """A directory for tokens that cannot be written to."""

    code = "NXDT-D213"
    happened = "{path} cannot be written, where the tokens of texts are kept: {reason}."
    remedy = "Make room there, or name another directory with data.cache_dir."
    path: str
    reason: str


class EmptyData(NxdtError):
    """A dataset without rows."""

    code = "NXDT-D214"
    happened = "{key}: {path} has no rows."
    remedy = "Name a dataset with rows; a filter that kept nothing, or an aborted download, looks like this."
    key: str
    path: str


class RowsDiffer(NxdtError):
    """A stream whose first rows have the length of a sample, and a later one has not."""

    code = "NXDT-D215"
    happened = "Row {row} of {path} has {found} tokens; the first rows have {seq_length}, as a sample has."
    remedy = "Set data.packing: true packs rows end to end, false pads short ones."
    path: str
    row: int
    found: int
    seq_length: int


class ColumnsDiffer(NxdtError):
    """Rows of a stream that have other columns than its first ones."""

    code = "NXDT-D216"
    happened = "From row {row} on, {path} has {found}; the first rows, those of {first}, have {expected}."
    remedy = "Give all files the same columns, or make a source of each kind; what a row lacks is not guessed."
    path: str
    row: int
    columns: tuple[str, ...]
    first: str
    wanted: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "found": listing(self.columns), "expected": listing(self.wanted)}


class SplitUnclear(NxdtError):
    """A directory with files of several splits, and one that cannot be determined."""

    code = "NXDT-D217"
    happened = "{key}: names in {path} say of what split a file is, and that of {file} says {found}."
    remedy = "Name the files that are meant with a pattern, or put those of each split into a directory of its name."
    key: str
    path: str
    file: str
    splits: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "found": listing(self.splits) or "none"}


class NothingToLearn(NxdtError):
    """Labels or padding that leave nothing to a loss."""

    code = "NXDT-D218"
    happened = "{key}: nothing is learnt of {path}: {where}, every label is -100, or its token is padding."
    remedy = "Correct 'labels' and 'attention_mask', or remove 'labels' to learn every token."
    key: str
    path: str
    where: str


class ColumnUnread(NxdtError):
    """A column that says where documents begin or what is learnt, in a form that is not read."""

    code = "NXDT-D219"
    happened = "{path} has a column {column!r}, which is not read, and none called {instead!r}."
    remedy = (
        "Write it as 'labels' with -100 for what is not learnt, or as 'position_ids' that restart with each document; "
        "or remove it."
    )
    path: str
    column: str
    instead: str
