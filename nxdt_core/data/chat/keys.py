"""The keys of ``data:`` that say how messages become text. Importing this costs nothing: no torch, no numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

from nxdt_core.data.files.keys import RecordFiles

__all__ = ["ChatKeys", "UnusedMode"]

UnusedMode = Literal["refuse", "report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatKeys(RecordFiles):
    """Base of the configurations of data whose records hold messages."""

    chat_template: str | None = None
    """Name of a shipped template (``chatml``, ``llama3``, …), or the text of one in Jinja; ``null`` takes the
    tokenizer's own."""
    chat_template_file: Path | None = None
    """A Jinja file with a template, instead of a name. Checkpoints keep its text."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template in addition to the messages, such as ``enable_thinking: false``."""
    template_date: str = "2024-07-26"
    """Date for templates that ask for today's, so that a run that is resumed tomorrow sees the same tokens."""
    unused_fields: UnusedMode = "report"
    """What to do with fields of records that neither their format nor the chat template uses: ``report`` counts them
    at the start of a run and in ``nxdt data preview``; ``refuse`` stops at the first one, with its place."""
    special_tokens_in_text: bool = False
    """Let a message's text spell special tokens, which then are those tokens; otherwise such a record is refused."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what cannot work with any files, as (key, message)."""
        yield from RecordFiles.check(self)
        if self.chat_template is not None and self.chat_template_file is not None:
            yield "chat_template_file", "chat_template is given too; keep one of the two"
        try:
            date.fromisoformat(self.template_date)
        except ValueError:
            yield "template_date", f"{self.template_date!r} is not a date; write it as 2024-07-26"
