"""Errors of indexed files and of the indices over them: codes ``NXDT-D10x``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError
from nxdt_core.errors.data import DataFileNotFound

__all__ = [
    "BadIndexFile",
    "DataShorterThanIndex",
    "EmptySplit",
    "EndOfDocumentUnknown",
    "IndexedFileMissing",
    "OtherTokenizer",
    "TokenOutsideVocabulary",
]


class IndexedFileMissing(DataFileNotFound):
    """A prefix without its two files."""

    code = "NXDT-D101"
    happened = "{key}: there is no {path}{near}."
    remedy = "Give the path without .bin and .idx; 'nxdt data preprocess' makes both."


class BadIndexFile(NxdtError):
    """An ``.idx`` that is not an index, or an incomplete one."""

    code = "NXDT-D102"
    happened = "{path} is not a complete Megatron index: {reason}."
    remedy = "Copy the file again, or make it again with 'nxdt data preprocess'; an aborted copy looks like this."
    path: str
    reason: str


class DataShorterThanIndex(NxdtError):
    """A ``.bin`` that ends before the last sequence of its ``.idx``."""

    code = "NXDT-D103"
    happened = "{path} has {found} bytes, and its index needs {needed}: the two are not of one make."
    remedy = "Copy both files again; an aborted copy looks like this."
    path: str
    found: int
    needed: int


class TokenOutsideVocabulary(NxdtError):
    """Data of a larger vocabulary than the one that reads it."""

    code = "NXDT-D104"
    happened = "{path}: sequence {sequence} holds the token {token}; {owner} has the ids 0 to {last}."
    remedy = "Name the tokenizer that made the data, and a model with a row for each of its ids."
    path: str
    sequence: int
    token: int
    owner: str
    last: int


class EmptySplit(NxdtError):
    """A split that is asked for and has no whole sample."""

    code = "NXDT-D105"
    happened = (
        "The {split} split of {path} has {documents} documents with {tokens} tokens; one sample of sequence length "
        "{seq_length} needs {needed}."
    )
    remedy = "Give it a larger share in data.splits_string, or 0 for none; or lower the sequence length."
    split: str
    path: str
    documents: int
    tokens: int
    seq_length: int
    needed: int


class OtherTokenizer(NxdtError):
    """Data that another tokenizer made than the run has."""

    code = "NXDT-D106"
    happened = "{path} was made with another tokenizer: its {aspect} is {found}, that of data.tokenizer {expected}."
    remedy = "Name the tokenizer that made the data, or set data.tokenizer to null; {note} says which it was."
    path: str
    note: str
    aspect: str
    found: object
    expected: object


class EndOfDocumentUnknown(NxdtError):
    """``eod_mask_loss`` where no setting says which token ends a document."""

    code = "NXDT-D107"
    happened = "data.eod_mask_loss leaves end-of-document tokens out of the loss, and it is not known which they are."
    remedy = "Name a tokenizer with an end-of-text token under data.tokenizer, or set data.eod_mask_loss to false."
