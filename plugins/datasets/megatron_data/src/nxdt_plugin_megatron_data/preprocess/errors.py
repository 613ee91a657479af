"""Errors of preprocessing: codes ``NXDT-D110`` to ``NXDT-D120``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

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
