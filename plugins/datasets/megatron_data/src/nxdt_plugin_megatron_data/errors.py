"""Errors of indexed files and of the indices over them: codes ``NXDT-D10x``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError
from nxdt_core.errors.data import nearby_paths

IndexedFileMissing = NxdtError.define(
    "NXDT-D101",
    "A prefix without its two files.",
    "{key}: there is no {path}{near}.",
    "Give the path without .bin and .idx; 'nxdt data preprocess' makes both.",
    defaults={"candidates": ()},
    also=nearby_paths,
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

OutputExists = NxdtError.define(
    "NXDT-D110",
    "Files that a run would replace.",
    "{path} exists already.",
    "Choose another --output-prefix, or give --overwrite to replace it.",
)

TooManyBadRecords = NxdtError.define(
    "NXDT-D111",
    "More records without text than are put up with.",
    "{bad} of {records} records hold no text, more than the share of {share:g} that is put up with:{faults}",
    "Raise --max-bad-share, with which the same command resumes where this one stopped; or correct the files, or "
    "name the key of the text with --text-key, and say --overwrite.",
    also=lambda error: {"faults": "".join(f"\n    {fault}" for fault in error.first)},
)

NoRoom = NxdtError.define(
    "NXDT-D112",
    "A disk, or a quota on it, that is full.",
    "There is no room left for {path} after {tokens} tokens: {reason}.",
    "Free some space and give the same command again: it resumes where it stopped.",
)

WorkerDied = NxdtError.define(
    "NXDT-D113",
    "A tokenising process that ended by itself.",
    "A process that tokenises has died, likely for want of memory.",
    "Give the same command with fewer --workers: it resumes where it stopped.",
)

OtherJob = NxdtError.define(
    "NXDT-D114",
    "An unfinished run with other inputs or settings.",
    "At {path} is an unfinished run whose files, tokenizer or settings were others than these.",
    "Give its own command to finish it, give --overwrite to start again, or choose another --output-prefix.",
)

OutputTaken = NxdtError.define(
    "NXDT-D115",
    "Another process that writes the same files.",
    "Another process writes {path}: {note}.",
    "Wait for it, or choose another --output-prefix.",
)

NoDocuments = NxdtError.define(
    "NXDT-D116",
    "Files without any text.",
    "The {files} files hold no text: {records} records, none of which becomes a token.",
    "Check the files, and the key of the text (--text-key).",
)

OutputUnwritable = NxdtError.define(
    "NXDT-D117",
    "Files that the operating system does not let us write.",
    "{path} cannot be written: {reason}.",
    "Choose an --output-prefix in a directory that you may write to.",
)

BadPrefix = NxdtError.define(
    "NXDT-D119",
    "A prefix that names no files, or others than it seems to.",
    "--output-prefix {prefix!r} {reason}.",
    "Give a directory and how the files' names begin: data/corpus makes data/corpus.bin and data/corpus.idx.",
)

InputInTheWay = NxdtError.define(
    "NXDT-D120",
    "An input that would be written over.",
    "{path} is one of the inputs, and would be written over.",
    "Choose another --output-prefix.",
)

NoEndToken = NxdtError.define(
    "NXDT-D118",
    "Documents that are to end with a token which the tokenizer does not have.",
    "The tokenizer '{tokenizer}' has no end-of-text token to put behind documents.",
    "Name one with --tokenizer-option eos_token=TOKEN, or say --no-append-eod.",
)

PartsDiffer = NxdtError.define(
    "NXDT-D121",
    "Parts to join that were made with other settings.",
    "{path}: its {aspect} is {found}, that of the first part {first}.",
    "Join only files that the same 'nxdt data preprocess' made, but for --shard.",
)
