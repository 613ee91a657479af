"""The keys of ``data:`` that belong to ``name: sft-chat``. Importing this costs nothing: no torch, no numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from nxdt_core.config.section import NonNegativeFloat, PositiveInt, Section
from nxdt_core.data.chat.templates import ChatKeys
from nxdt_core.errors import NxdtError

Truncation = Literal["refuse", "drop", "keep_start", "keep_end"]


class ChatSource(Section):
    """One of several sources of conversations; a key that it does not set is that of ``data``."""

    train_files: tuple[Path, ...] = ()
    """Training files of this source; see ``data.train_files``."""
    validation_files: tuple[Path, ...] = ()
    """Validation files of this source; see ``data.validation_files``."""
    weight: NonNegativeFloat = 1.0
    """Its share of the training samples, in relation to the other sources' weights."""
    chat_template: str | None = None
    """Chat template of this source; see ``data.chat_template``."""
    columns: Mapping[str, str] = Field(default_factory=dict)
    """Columns of this source; see ``data.columns``."""
    dev_choose_samples: PositiveInt | None = None
    """Number of samples of this source; see ``data.dev_choose_samples``."""


class ChatConfig(ChatKeys):
    """Conversations, rendered by a chat template, with the loss on what the assistant says.

    Files are JSONL (``.jsonl``, ``.ndjson``), JSON with a list (``.json``), tables of texts (``.csv``, ``.tsv``), Arrow
    or Parquet (``.arrow``, ``.parquet``), or directories of one of these; all may be compressed (``.gz``, ``.zst``).
    A path may be a pattern.
    """

    train_roles: tuple[Literal["system", "developer", "user", "assistant", "tool"], ...] = ("assistant",)
    """Whose messages the loss is on. A message's own ``train: true`` or ``train: false`` counts more."""
    train_turns: Literal["all", "last"] = "all"
    """Messages of those roles that are trained: all, or the last one of a conversation."""
    packing: bool = False
    """Put several conversations into one sequence, apart from each other; otherwise each is padded to a sequence."""
    truncation: Truncation = "refuse"
    """Treatment of a conversation that is longer than a sequence: ``refuse`` reports its place as an error, ``drop``
    skips and counts it, ``keep_start`` cuts off its end, ``keep_end`` its start, system prompt included."""

    sources: Mapping[str, ChatSource] = Field(default_factory=dict)
    """Several sources by names that you choose, instead of the keys that name files."""

    def of_source(self, name: str) -> ChatConfig:
        """Return the configuration of one source alone."""
        source = self.sources[name]
        return self.changed(
            sources={},
            train_files=source.train_files,
            validation_files=source.validation_files,
            chat_template=source.chat_template or self.chat_template,
            chat_template_file=None if source.chat_template else self.chat_template_file,
            columns=source.columns or self.columns,
            dev_choose_samples=source.dev_choose_samples or self.dev_choose_samples,
        )

    def check(self) -> Iterator[tuple[str, str | NxdtError]]:
        """Yield what cannot work with any files, as (key, message)."""
        named = [key for key in ("train", "validation", "test") if self.files(key)]
        if self.sources and named:
            yield f"{named[0]}_files", "the sources name the data already; move the files into one of them"
        for name, source in self.sources.items():
            yield from ((f"sources.{name}.{key}", message) for key, message in self.of_source(name).check())
            if source.train_files and not source.weight:
                yield f"sources.{name}.weight", "a weight of 0 takes nothing of it; take its train_files out"
        if not self.sources:
            yield from ChatKeys.check(self)
        if not self.train_roles:
            yield "train_roles", "no role is named, so that nothing would be trained"
