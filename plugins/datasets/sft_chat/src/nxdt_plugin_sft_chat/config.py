"""The keys of ``data:`` that belong to ``name: sft-chat``. Importing this costs nothing: no torch, no numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from nxdt_core.data.chat.templates import ChatKeys

Truncation = Literal["refuse", "drop", "keep_start", "keep_end"]


class ChatConfig(ChatKeys):
    """Conversations, rendered by a chat template, with the loss on what the assistant says.

    Files are JSONL (``.jsonl``, ``.ndjson``), JSON with a list (``.json``), Arrow or Parquet (``.arrow``,
    ``.parquet``), or directories of one of these; JSON ones may be compressed (``.gz``, ``.zst``).
    A path may be a pattern.
    """

    train_roles: tuple[Literal["system", "developer", "user", "assistant", "tool"], ...] = ("assistant",)
    """Whose messages the loss is on. A message's own ``train: true`` or ``train: false`` counts more."""
    train_turns: Literal["all", "last"] = "all"
    """All messages of those roles, or the last one of a conversation."""
    packing: bool = False
    """Put several conversations into one sequence, apart from each other; otherwise each is padded to a sequence."""
    truncation: Truncation = "refuse"
    """Of a conversation that is longer than a sequence: ``refuse`` it, with its place; ``drop`` it, counted;
    ``keep_start`` cuts its end off, ``keep_end`` its start, system prompt included."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what cannot work with any files, as (key, message)."""
        yield from ChatKeys.check(self)
        if not self.train_roles:
            yield "train_roles", "no role is named, so that nothing would be trained"
