"""The keys of ``data:`` that belong to ``name: hf-data``. Importing this costs nothing: no numpy, no Arrow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from nxdt_core.config.section import NonNegativeFloat, PositiveInt, Section, Written

_SMALLEST = 1e-5
"""Share below which the others would be repeated beyond measure until each sample of a source has come."""


class SourceConfig(Section):
    """One of several sources of a mixture."""

    train_dir: Path | None = None
    """Training data of this source, by the rules of ``data.train_dir``."""
    val_dir: Path | None = None
    """Validation data of this source, by the rules of ``data.val_dir``."""
    test_dir: Path | None = None
    """Test data of this source, by the rules of ``data.test_dir``."""
    weight: NonNegativeFloat = 1.0
    """Its share of the training samples, in relation to the other sources' weights."""
    text_key: str | None = None
    """Column of this source that holds the text; null takes ``data.text_key``."""


class HfDataConfig(Section):
    """Datasets that ``datasets`` has saved, or files that are read from their beginning to their end.

    A column ``input_ids`` holds tokens, and ``labels`` and ``attention_mask`` where the dataset has them;
    without that column the one that ``text_key`` names holds text, which the run's tokenizer turns into tokens.
    """

    train_dir: Path | None = None
    """Training data: a directory as ``Dataset.save_to_disk`` writes it. With ``streaming`` also one with Parquet, JSONL
    or Arrow files, such a file, or a pattern of them."""
    val_dir: Path | None = None
    """Validation data."""
    test_dir: Path | None = None
    """Test data, for ``trainer.test`` of the Lightning plugin. ``nxdt train`` does not read it."""
    sources: Mapping[str, SourceConfig] = Field(default_factory=dict)
    """Several sources by names that you choose, instead of the three keys above."""
    streaming: bool = False
    """Read files in order and keep nothing of them in memory, instead of drawing samples from all of the data."""
    shuffle_block: PositiveInt = 512
    """Samples that a stream with ``data.shuffle`` reads ahead and takes in a random order. The order of the files
    differs in each pass, too."""
    text_key: str = "text"
    """Column that holds the text, where there is no column ``input_ids``."""
    packing: bool | None = None
    """Pack rows: ``true`` joins them as documents and cuts them into samples. ``false`` makes each row a sample, padded
    where it is shorter. ``null``: rows of tokens that all have the length of a sample are samples, others and texts are
    documents."""
    add_bos: bool = False
    """Put the tokenizer's begin-of-text token before each text."""
    add_eos: bool = True
    """Put the tokenizer's end-of-text token behind each text."""
    reset_attention_mask: bool = True
    """Keep documents apart that share a sample: attention does not reach from one into another."""
    reset_position_ids: bool = True
    """Let positions restart at 0 with each document of a sample."""
    eod_mask_loss: bool = False
    """Leave the positions out of the loss whose input is the end-of-text token."""
    cache_dir: Annotated[Path | None, Written()] = None
    """Directory that keeps the tokens of texts for later runs; ``null``: ``data/`` in the run's directory. One process
    of a machine makes them for all. It has no effect for tokens and for streams."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what cannot work with any files, as (key, message)."""
        alone = [key for key in ("train_dir", "val_dir", "test_dir") if getattr(self, key) is not None]
        if self.sources and alone:
            yield alone[0], "the sources name the data already; move it into one of them"
        elif not self.sources and not alone:
            yield "train_dir", "no data is named; give a directory that datasets has saved"
        total = sum(source.weight for source in self.sources.values() if source.train_dir is not None)
        for name, source in self.sources.items():
            if source.train_dir is source.val_dir is source.test_dir is None:
                yield f"sources.{name}", "it names no data; give it a train_dir, val_dir or test_dir"
            if source.train_dir is not None and source.weight == 0:
                yield f"sources.{name}.weight", "a weight of 0 takes nothing of it; take its train_dir out"
            elif source.train_dir is not None and source.weight < _SMALLEST * total:
                yield f"sources.{name}.weight", f"{source.weight:g} is less than {_SMALLEST:g} of all weights' sum"
        if self.eod_mask_loss and not self.add_eos:
            yield "eod_mask_loss", "there is no end-of-text token to mask; set add_eos to true"

    def named_sources(self) -> Mapping[str, SourceConfig]:
        """Return the sources by name; the only one of a file that names none is called ``data``."""
        if self.sources:
            return self.sources
        return {"data": SourceConfig(train_dir=self.train_dir, val_dir=self.val_dir, test_dir=self.test_dir)}
