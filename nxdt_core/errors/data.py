"""Errors of data and tokenizers: codes ``NXDT-D…``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError, listing

__all__ = [
    "ArrowMissing",
    "ArrowUnreadable",
    "BadBatchSize",
    "BadJsonFile",
    "BadJsonLine",
    "BadTokenizerConfig",
    "BadTokenizerFile",
    "DataChanged",
    "DataFileChanged",
    "DataFileNotFound",
    "DataFileUnreadable",
    "DataNeedsTokenizer",
    "DataRankMissing",
    "EmptyDataset",
    "EmptyTextFile",
    "JsonTextMissing",
    "MixedSamples",
    "NoRecords",
    "RanksForSentencePiece",
    "SpecialTokenMissing",
    "SplitMissing",
    "TextNotUtf8",
    "TokenizerFileNotFound",
    "TokenizerLibraryMissing",
    "TooFewTokens",
]


class DataFileNotFound(NxdtError):
    """A file or pattern of the data section that matches nothing."""

    code = "NXDT-D001"
    happened = "{key}: nothing is found at '{path}'{near}."
    remedy = "Correct the path; a relative path starts at the directory of the file that names it."
    key: str
    path: str
    candidates: tuple[str, ...] = ()

    def _view(self) -> dict[str, Any]:
        near = f"; found nearby: {listing(self.candidates)}" if self.candidates else ""
        return {**super()._view(), "near": near}


class EmptyTextFile(NxdtError):
    """A data file without any text."""

    code = "NXDT-D002"
    happened = "{path} holds no text."
    remedy = "Name another file, or fill it."
    path: str


class DataFileUnreadable(NxdtError):
    """A data file that the operating system or a decompressor refuses."""

    code = "NXDT-D003"
    happened = "{path} cannot be read: {reason}."
    remedy = "Check that it is complete, of a format that is read, and that you may read it."
    path: str
    reason: str


class TextNotUtf8(NxdtError):
    """A data file with bytes that are not UTF-8."""

    code = "NXDT-D004"
    happened = "{path} is not UTF-8: byte {byte:#04x} at position {position} of line {line}{guess}."
    remedy = "Convert it, and name the new file: {command}"
    path: str
    position: int
    """In the line, from 0."""
    line: int
    byte: int
    encoding: str
    """As ``iconv`` calls it; empty where none is known."""
    shown: str
    """Part of the text, in that encoding."""
    command: str

    def _view(self) -> dict[str, Any]:
        guess = f"; it looks like {self.encoding}, in which the text reads {self.shown!r}" if self.encoding else ""
        return {**super()._view(), "guess": guess}


class BadJsonLine(NxdtError):
    """A line of a JSONL file that is not a JSON object."""

    code = "NXDT-D005"
    happened = "{path}:{line}: not a JSON object: {reason}."
    remedy = "Each line holds one whole object{such}; correct or remove this one."
    path: str
    line: int
    reason: str
    example: str = ""
    """An object of the kind that is read."""

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "such": f", such as {self.example}" if self.example else ""}


class JsonTextMissing(NxdtError):
    """A JSON object without a string under the key that holds the text."""

    code = "NXDT-D006"
    happened = "{path}:{line}: no text under the key '{key}'; {found}."
    remedy = "Set data.text_key to the key that holds the text, or correct the line."
    path: str
    line: int
    key: str
    found: str


class TooFewTokens(NxdtError):
    """A split that is shorter than one sample."""

    code = "NXDT-D007"
    happened = "The {split} data has {found} tokens; one sample of sequence length {seq_length} needs {needed}."
    remedy = "Add text, or lower the sequence length{hint}."
    split: str
    found: int
    needed: int
    seq_length: int
    hint: str = ""


class EmptyDataset(NxdtError):
    """A dataset that yields no sample."""

    code = "NXDT-D008"
    happened = "The dataset yields no sample."
    remedy = "Check which files and which split the data section names."


class BadBatchSize(NxdtError):
    """Batch sizes that do not divide."""

    code = "NXDT-D009"
    happened = (
        "A global batch of {global_batch_size} does not divide into micro-batches of {micro_batch_size} "
        "on {dp_size} data-parallel ranks."
    )
    remedy = "Make the global batch size a multiple of {unit} (micro-batch size x data-parallel ranks)."
    global_batch_size: int
    micro_batch_size: int
    dp_size: int

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "unit": self.micro_batch_size * self.dp_size}


class DataRankMissing(NxdtError):
    """A loader in one of several processes that was not given the process's share of the data."""

    code = "NXDT-D025"
    happened = "GlobalBatchLoader has no dp_rank and dp_size, and this is one of {world_size} processes of a group."
    remedy = (
        "Build the loader with nxdt_core.training.build.batches(config, engine, dataset), or pass dp_rank and "
        "dp_size of engine.rank_info (0 and 1 where all processes read the same samples)."
    )
    world_size: int


class DataChanged(NxdtError):
    """A checkpoint whose data is not the data of this run, so that its position means nothing."""

    code = "NXDT-D010"
    happened = "The checkpoint was made with {aspect} {saved!r}; this run has {found!r}."
    remedy = "Restore the data, tokenizer and settings of that run to resume it, or start a new run from its weights."
    aspect: str
    saved: object
    found: object


class DataFileChanged(NxdtError):
    """A data file that has another size than when the run began to read it."""

    code = "NXDT-D026"
    happened = "{path} has changed while the run reads it: it had {before} bytes, and now has {now}."
    remedy = "Restore the file and start the same command again: the run resumes from its newest checkpoint."
    path: str
    before: int
    now: int


class MixedSamples(NxdtError):
    """Samples of one batch that do not fit together."""

    code = "NXDT-D011"
    happened = "Samples of one batch have different lengths: {lengths}."
    remedy = "Let the dataset cut or pad every sample to the run's sequence length."
    lengths: tuple[int, ...]


class DataNeedsTokenizer(NxdtError):
    """Text without a tokenizer."""

    code = "NXDT-D012"
    happened = "The '{dataloader}' data is text, and the configuration names no tokenizer."
    remedy = "Set data.tokenizer.library, for example to 'byte', which needs no files."
    dataloader: str


class SpecialTokenMissing(NxdtError):
    """A special token that is asked for and that the tokenizer does not have."""

    code = "NXDT-D013"
    happened = "{key} asks for a token that the tokenizer does not have ({token})."
    remedy = (
        "Set {key} to false, or name the token: in the tokenizer's files, or under data.tokenizer where it has a key."
    )
    key: str
    token: str


class SplitMissing(NxdtError):
    """A split that is asked for and that the configuration names no data for."""

    code = "NXDT-D014"
    happened = "The configuration names no {split} data."
    remedy = "Name files for them in the data section, or ask for another split."
    split: str


class TokenizerLibraryMissing(NxdtError):
    """A tokenizer whose library is not installed."""

    code = "NXDT-D020"
    happened = "The tokenizer '{tokenizer}' needs the package '{package}', which cannot be imported: {reason}."
    remedy = "Run: pip install nxdt-core[{extra}]"
    tokenizer: str
    package: str
    extra: str
    reason: str


class TokenizerFileNotFound(NxdtError):
    """A tokenizer's file or directory that is not there."""

    code = "NXDT-D021"
    happened = "{key}: '{path}' is not a {wanted}{near}."
    remedy = "Correct the path, or download the tokenizer's files there first."
    key: str
    path: str
    wanted: str
    candidates: tuple[str, ...] = ()

    def _view(self) -> dict[str, Any]:
        near = f"; found nearby: {listing(self.candidates)}" if self.candidates else ""
        return {**super()._view(), "near": near}


class BadTokenizerFile(NxdtError):
    """A tokenizer's file that its library does not accept."""

    code = "NXDT-D022"
    happened = "{path} is not a {wanted}: {reason}."
    remedy = "Replace the file with a whole one; an aborted download looks like this."
    path: str
    wanted: str
    reason: str


class BadTokenizerConfig(NxdtError):
    """Settings of a tokenizer that exclude each other or do not fit its files."""

    code = "NXDT-D023"
    happened = "{key}: {reason}."
    remedy = "Correct the section data.tokenizer."
    key: str
    reason: str


class RanksForSentencePiece(NxdtError):
    """A file of tiktoken's where a SentencePiece model is read; both are called ``tokenizer.model``."""

    code = "NXDT-D024"
    happened = "{path} is not a SentencePiece model: it holds lines of BPE ranks, as tiktoken reads them."
    remedy = (
        "Set data.tokenizer.library to tiktoken (nxdt data preprocess: --tokenizer-option library=tiktoken), and "
        "pattern and special_tokens too where they are not those of Llama 3."
    )
    path: str


class NoRecords(NxdtError):
    """A file without records."""

    code = "NXDT-D305"
    happened = "{path} holds no records."
    remedy = "Name another file, or fill it."
    path: str


class BadJsonFile(NxdtError):
    """A JSON file that is not a list of records."""

    code = "NXDT-D307"
    happened = "{path}: no list of JSON objects: {reason}."
    remedy = "Write a list of objects, or one object per line in a file whose name ends in .jsonl."
    path: str
    reason: str


class ArrowMissing(NxdtError):
    """Arrow files without the library that reads them."""

    code = "NXDT-D308"
    happened = "{path} needs the package 'pyarrow', which cannot be imported: {reason}."
    remedy = "Run: pip install 'nxdt-core[arrow]'"
    path: str
    reason: str


class ArrowUnreadable(NxdtError):
    """A file that Arrow does not accept."""

    code = "NXDT-D309"
    happened = "{path} is not an Arrow or Parquet file: {reason}."
    remedy = "Replace it with a whole one, as 'save_to_disk' of Hugging Face's datasets writes it."
    path: str
    reason: str
