"""Errors of datasets: codes ``NXDT-D200`` to ``NXDT-D219``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

NoDataset = NxdtError.define(
    "NXDT-D200",
    "A path that is not a dataset of the datasets library.",
    "{key}: {path} is not a dataset as datasets' save_to_disk writes it: {found}.",
    "{advice}",
    usual_remedy="Name the directory that was given to save_to_disk.",
    defaults={"advice": "Name the directory that was given to save_to_disk."},
)

DamagedDataset = NxdtError.define(
    "NXDT-D201",
    "Files of a dataset that Arrow or the datasets library refuses.",
    "{path} cannot be read: {reason}.",
    "Copy or make it again; an aborted copy looks like this.",
)

SplitMissing = NxdtError.define(
    "NXDT-D202",
    "A directory with several splits, none of them the one that is wanted.",
    "{key}: {path} holds the splits {splits:list}, and none called {wanted!r}.",
    "{advice}",
    usual_remedy="Name a split that the dataset has.",
)

ColumnMissing = NxdtError.define(
    "NXDT-D203",
    "A dataset without tokens and without text.",
    "{path} has neither a column 'input_ids' nor the text column {text_key!r}; it has {columns:list}.",
    "Set data.text_key to the column that holds the text, or tokenise the dataset into 'input_ids'.",
)

WrongColumnType = NxdtError.define(
    "NXDT-D204",
    "A column whose values are of another type.",
    "Column {column!r} of {path} is of type {found}; it must be {wanted}.",
    "Correct the column, for example with datasets' cast_column, and save the dataset again.",
)

NullValue = NxdtError.define(
    "NXDT-D205",
    "A row without a value.",
    "Column {column!r} of {path} lacks a value in {count} places, the first of them in row {row}.",
    "Filter such rows out and save the dataset again.",
)

ColumnsDisagree = NxdtError.define(
    "NXDT-D206",
    "Columns whose lists have different lengths in one row.",
    "Row {row} of {path} has {tokens} input_ids and {found} {column}.",
    "Both need one value a token; make the column again, or remove it.",
)

MisfitRows = NxdtError.define(
    "NXDT-D207",
    "Tokens that were cut to another length than the run's.",
    "Each row of {path} has {found} tokens; a sample of this run has {seq_length}.",
    "Set data.seq_length to {found}, or data.packing to true to pack the rows into samples.",
)

RowTooLong = NxdtError.define(
    "NXDT-D208",
    "A row that does not fit a sample.",
    "Row {row} of {path} has {found} tokens; a sample has {seq_length}, and data.packing is false.",
    "Raise data.seq_length, shorten the row, or set data.packing to true. Nothing is truncated silently.",
)

PaddedDocuments = NxdtError.define(
    "NXDT-D209",
    "Rows with padding that are to be packed.",
    "Rows of {path} are padded (its attention_mask has zeros), and they are to be packed.",
    "Set data.packing to false, or save the dataset without padding.",
)

TokenOutOfVocabulary = NxdtError.define(
    "NXDT-D210",
    "A token that the model has no row for.",
    "{place} has the token {token}; the model's vocabulary has {vocab_size} rows.",
    "Set model.vocab_size to what the dataset's tokenizer has, or tokenise it with this model's tokenizer.",
)

UnknownDataFormat = NxdtError.define(
    "NXDT-D211",
    "A file of a format that streams do not read.",
    "{key}: {path} is of no format that is read here.",
    "Files end in {known}; of a directory, those are taken.",
)

CacheUnwritable = NxdtError.define(
    "NXDT-D213",
    "A directory for tokens that cannot be written to.",
    "{path} cannot be written, where the tokens of texts are kept: {reason}.",
    "Make room there, or name another directory with data.cache_dir.",
)

EmptyData = NxdtError.define(
    "NXDT-D214",
    "A dataset without rows.",
    "{key}: {path} has no rows.",
    "Name a dataset with rows; a filter that kept nothing, or an aborted download, looks like this.",
)

RowsDiffer = NxdtError.define(
    "NXDT-D215",
    "A stream whose first rows have the length of a sample, and a later one has not.",
    "Row {row} of {path} has {found} tokens; the first rows have {seq_length}, as a sample has.",
    "Set data.packing: true packs rows end to end, false pads short ones.",
)

ColumnsDiffer = NxdtError.define(
    "NXDT-D216",
    "Rows of a stream that have other columns than its first ones.",
    "From row {row} on, {path} has {columns:list}; the first rows, those of {first}, have {wanted:list}.",
    "Give all files the same columns, or make a source of each kind; what a row lacks is not guessed.",
)

SplitUnclear = NxdtError.define(
    "NXDT-D217",
    "A directory with files of several splits, and one that cannot be determined.",
    "{key}: names in {path} say of what split a file is, and that of {file} says {splits:list}.",
    "Name the files that are meant with a pattern, or put those of each split into a directory of its name.",
)

NothingToLearn = NxdtError.define(
    "NXDT-D218",
    "Labels or padding that leave nothing to a loss.",
    "{key}: nothing is learnt of {path}: {where}, every label is -100, or its token is padding.",
    "Correct 'labels' and 'attention_mask', or remove 'labels' to learn every token.",
)

ColumnUnread = NxdtError.define(
    "NXDT-D219",
    "A column that says where documents begin or what is learnt, in a form that is not read.",
    "{path} has a column {column!r}, which is not read, and none called {instead!r}.",
    "Write it as 'labels' with -100 for what is not learnt, or as 'position_ids' that restart with each document; "
    "or remove it.",
)
