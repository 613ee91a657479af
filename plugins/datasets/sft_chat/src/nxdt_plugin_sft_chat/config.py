"""The keys of ``data:`` that belong to ``name: sft-chat``. Importing this costs nothing: no torch, no numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

from nxdt_core.data.record_files import RecordFiles

__all__ = ["ROLES", "ChatConfig", "Truncation"]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who may speak."""

Truncation = Literal["refuse", "drop", "keep_start", "keep_end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig(RecordFiles):
    """Conversations, rendered by a chat template, with the loss on what the assistant says.

    Files are JSONL (``.jsonl``, ``.ndjson``), JSON with a list (``.json``), Arrow or Parquet (``.arrow``,
    ``.parquet``), or directories of Arrow files; JSON ones may be compressed (``.gz``). A path may be a pattern.
    """

    chat_template: str | None = None
    """Name of a template that this package brings (``chatml``, ``llama3``, …); ``null`` takes the tokenizer's own."""
    chat_template_file: Path | None = None
    """A Jinja file with a template, instead of a name."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """What the template is told beside the messages, such as ``enable_thinking: false``."""
    template_date: str = "2024-07-26"
    """What templates that ask for today's date are told, so that a run that goes on tomorrow sees the same tokens."""
    special_tokens_in_text: bool = False
    """Let a message's text spell special tokens, which then are those tokens; otherwise such a record is refused."""
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
        """What cannot work whatever the files hold, as (key, message)."""
        yield from RecordFiles.check(self)
        if self.chat_template is not None and self.chat_template_file is not None:
            yield "chat_template_file", "chat_template is given too; keep one of the two"
        if not self.train_roles:
            yield "train_roles", "nobody is named, so that nothing would be trained"
        try:
            date.fromisoformat(self.template_date)
        except ValueError:
            yield "template_date", f"{self.template_date!r} is no date; write it as 2024-07-26"
