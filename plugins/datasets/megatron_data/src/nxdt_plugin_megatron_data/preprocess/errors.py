"""Errors of preprocessing: codes ``NXDT-D110`` to ``NXDT-D120``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors import NxdtError

__all__ = [
    "BadPrefix",
    "InputInTheWay",
    "NoDocuments",
    "NoEndToken",
    "NoRoom",
    "OtherJob",
    "OutputExists",
    "OutputTaken",
    "OutputUnwritable",
    "TooManyBadRecords",
    "WorkerDied",
]


class OutputExists(NxdtError):
    """Files that a run would replace."""

    code = "NXDT-D110"
    happened = "{path} exists already."
    remedy = "Choose another --output-prefix, or give --overwrite to replace it."
    path: str


class TooManyBadRecords(NxdtError):
    """More records without text than are put up with."""

    code = "NXDT-D111"
    happened = "{bad} of {records} records hold no text, more than the share of {share:g} that is put up with:{faults}"
    remedy = (
        "Raise --max-bad-share, with which the same command resumes where this one stopped; or correct the files, or "
        "name the key of the text with --text-key, and say --overwrite."
    )
    bad: int
    records: int
    share: float
    first: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "faults": "".join(f"\n    {fault}" for fault in self.first)}


class NoRoom(NxdtError):
    """A disk, or a quota on it, that is full."""

    code = "NXDT-D112"
    happened = "There is no room left for {path} after {tokens} tokens: {reason}."
    remedy = "Free some space and give the same command again: it resumes where it stopped."
    path: str
    tokens: int
    reason: str


class WorkerDied(NxdtError):
    """A tokenising process that ended by itself."""

    code = "NXDT-D113"
    happened = "A process that tokenises has died, likely for want of memory."
    remedy = "Give the same command with fewer --workers: it resumes where it stopped."


class OtherJob(NxdtError):
    """An unfinished run with other inputs or settings."""

    code = "NXDT-D114"
    happened = "At {path} is an unfinished run whose files, tokenizer or settings were others than these."
    remedy = "Give its own command to finish it, give --overwrite to start again, or choose another --output-prefix."
    path: str


class OutputTaken(NxdtError):
    """Another process that writes the same files."""

    code = "NXDT-D115"
    happened = "Another process writes {path}: {note}."
    remedy = "Wait for it, or choose another --output-prefix."
    path: str
    note: str


class NoDocuments(NxdtError):
    """Files without any text."""

    code = "NXDT-D116"
    happened = "The {files} files hold no text: {records} records, none of which becomes a token."
    remedy = "Check the files, and the key of the text (--text-key)."
    files: int
    records: int


class OutputUnwritable(NxdtError):
    """Files that the operating system does not let us write."""

    code = "NXDT-D117"
    happened = "{path} cannot be written: {reason}."
    remedy = "Choose an --output-prefix in a directory that you may write to."
    path: str
    reason: str


class BadPrefix(NxdtError):
    """A prefix that names no files, or others than it seems to."""

    code = "NXDT-D119"
    happened = "--output-prefix {prefix!r} {reason}."
    remedy = "Give a directory and how the files' names begin: data/corpus makes data/corpus.bin and data/corpus.idx."
    prefix: str
    reason: str


class InputInTheWay(NxdtError):
    """An input that would be written over."""

    code = "NXDT-D120"
    happened = "{path} is one of the inputs, and would be written over."
    remedy = "Choose another --output-prefix."
    path: str


class NoEndToken(NxdtError):
    """Documents that are to end with a token which the tokenizer does not have."""

    code = "NXDT-D118"
    happened = "The tokenizer '{tokenizer}' has no end-of-text token to put behind documents."
    remedy = "Name one with --tokenizer-option eos_token=TOKEN, or say --no-append-eod."
    tokenizer: str
