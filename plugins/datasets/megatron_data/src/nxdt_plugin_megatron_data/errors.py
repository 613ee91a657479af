"""Errors of indexed files and of the indices over them: codes ``NXDT-D10x``."""

from __future__ import annotations

from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.data import found_nearby

IndexedFileMissing = NxdtError.define(
    "NXDT-D101",
    "A prefix without its two files.",
    "{key}: there is no {path}{near}.",
    "Give the path without .bin and .idx; 'nxdt data preprocess' makes both.",
    defaults={"candidates": ()},
    also=found_nearby,
)

BadIndexFile = NxdtError.define(
    "NXDT-D102",
    "An ``.idx`` that is not an index, or an incomplete one.",
    "{path} is not a complete Megatron index: {reason}.",
    "Copy the file again, or make it again with 'nxdt data preprocess'; an aborted copy looks like this.",
)

DataShorterThanIndex = NxdtError.define(
    "NXDT-D103",
    "A ``.bin`` that ends before the last sequence of its ``.idx``.",
    "{path} has {found} bytes, and its index needs {needed}: the two are not of one make.",
    "Copy both files again; an aborted copy looks like this.",
)

TokenOutsideVocabulary = NxdtError.define(
    "NXDT-D104",
    "Data of a larger vocabulary than the one that reads it.",
    "{path}: sequence {sequence} holds the token {token}; {owner} has the ids 0 to {last}.",
    "Name the tokenizer that made the data, and a model with a row for each of its ids.",
)

EmptySplit = NxdtError.define(
    "NXDT-D105",
    "A split that is asked for and has no whole sample.",
    "The {split} split of {path} has {documents} documents with {tokens} tokens; one sample of sequence length "
    "{seq_length} needs {needed}.",
    "Give it a larger share in data.splits_string, or 0 for none; or lower the sequence length.",
)

OtherTokenizer = NxdtError.define(
    "NXDT-D106",
    "Data that another tokenizer made than the run has.",
    "{path} was made with another tokenizer: its {aspect} is {found}, that of data.tokenizer {expected}.",
    "Name the tokenizer that made the data, or set data.tokenizer to null; {note} says which it was.",
)

EndOfDocumentUnknown = NxdtError.define(
    "NXDT-D107",
    "``eod_mask_loss`` where no setting says which token ends a document.",
    "data.eod_mask_loss leaves end-of-document tokens out of the loss, and it is not known which they are.",
    "Name a tokenizer with an end-of-text token under data.tokenizer, or set data.eod_mask_loss to false.",
)
