"""The keys of ``data:`` that belong to ``name: text``. Importing this costs nothing: no torch, no numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import Field

from nxdt_core.config.section import Fraction, Section


class TextConfig(Section):
    """Plain text and JSONL files, tokenised when the run starts and kept in memory.

    A file whose name ends in ``.jsonl``, ``.ndjson`` or ``.json`` has a JSON object per line, every other is plain
    text; either may be compressed (``.gz``, ``.zst``). A path may be a pattern (``corpus/*.txt``); matches come in
    sorted order.
    """

    train_files: tuple[Path, ...] = ()
    """Files to train on, in this order: paths, patterns, or files of a dataset of the Hugging Face hub
    (``hf:owner/name/*.jsonl``)."""
    validation_files: tuple[Path, ...] = ()
    """Files to validate on."""
    validation_sets: Mapping[str, tuple[Path, ...]] = Field(default_factory=dict)
    """Named sets of files, instead of ``validation_files``; loss and perplexity are reported for each set."""
    test_files: tuple[Path, ...] = ()
    """Files to test on, with ``trainer.test`` of the Lightning plugin. ``nxdt train`` does not read them."""
    validation_fraction: Fraction = 0.0
    """Share of the training tokens, taken from their end, to validate on instead of files; 0 takes none."""
    text_key: str = "text"
    """Key of the text in each object of a JSONL file."""
    weight_key: str | None = None
    """Key of the weight that the tokens of a JSONL file's object have in the loss: a number of at least 0; 0 leaves the
    document out. Objects without it, and plain text, have 1. ``null``: no weights are read."""
    document_separator: str | None = None
    """Separator between documents of a plain text file, such as ``"\\n\\n"`` for blank lines; null makes each file
    one document."""
    add_bos: bool = False
    """Put the tokenizer's begin-of-text token before each document."""
    add_eos: bool = True
    """Put the tokenizer's end-of-text token behind each document."""
    reset_attention_mask: bool = True
    """Keep documents apart that share a sample: attention does not reach from one into another."""
    reset_position_ids: bool = True
    """Let positions restart at 0 with each document of a sample."""
    eod_mask_loss: bool = False
    """Leave the positions out of the loss whose input is the end-of-text token."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what cannot work with any files, as (key, message)."""
        if not (self.train_files or self.validation_files or self.test_files):
            yield "train_files", "no files are named; give at least one path or pattern"
        if not 0 <= self.validation_fraction < 1:
            yield "validation_fraction", f"{self.validation_fraction} is not a share; it must be at least 0 and below 1"
        if self.validation_fraction and self.validation_files:
            yield "validation_fraction", "validation_files are named too; set one of the two"
        if self.validation_fraction and not self.train_files:
            yield "validation_fraction", "there are no train_files to take a share of"
        if self.validation_sets and (self.validation_files or self.validation_fraction):
            yield "validation_sets", "validation_files or validation_fraction is set too; set one of them"
        if self.document_separator == "":
            yield "document_separator", "an empty string separates nothing; use null for one document a file"
        if self.eod_mask_loss and not self.add_eos:
            yield "eod_mask_loss", "there is no end-of-text token to mask; set add_eos to true"
