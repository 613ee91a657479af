"""The chat template of a run (the tokenizer's own, a shipped one, its text or a file), and the keys for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from nxdt_core.config.hub import complete
from nxdt_core.data.files.paths import RecordFiles, decode, read_bytes
from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.chats import TemplateUnknown
from nxdt_core.errors.data import DataFileNotFound
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.system.paths import resolve_path

_AS_TEXT = "plain"
"""The shipped template whose chats begin as texts do."""
_SUFFIX = ".jinja"
_SHIPPED = files(__package__).joinpath("shipped_templates")
_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
_TODAY = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1")


class ChatKeys(RecordFiles):
    """Base of the configurations of data whose records hold messages."""

    chat_template: str | None = None
    """Name of a shipped template (``chatml``, ``llama3``, …), or the text of one in Jinja; ``null`` takes the
    tokenizer's own."""
    chat_template_file: Path | None = None
    """A Jinja file with a template, instead of a name. Checkpoints keep its text."""
    template_options: Mapping[str, Any] = Field(default_factory=dict)
    """Variables for the template in addition to the messages, such as ``enable_thinking: false``."""
    template_date: str = "2024-07-26"
    """Date for templates that ask for today's, so that a run that is resumed tomorrow sees the same tokens."""
    unused_fields: Literal["refuse", "report"] = "report"
    """Treatment of fields of records that neither their format nor the chat template uses. ``report`` counts them at
    the start of a run and in ``nxdt data preview``; ``refuse`` stops at the first one, with its place."""
    add_bos: bool = False
    """Begin texts, and chats of the template ``plain``, with the tokenizer's begin token. By default they begin as the
    tokenizer's own files say. Other templates write their own begin."""
    special_tokens_in_text: bool = False
    """Let a message's text spell special tokens, which then are those tokens; otherwise such a record is refused."""

    def check(self) -> Iterator[tuple[str, str | NxdtError]]:
        """Yield what cannot work with any files, as (key, message)."""
        yield from RecordFiles.check(self)
        if self.chat_template is not None and self.chat_template_file is not None:
            yield "chat_template_file", "chat_template is given too; keep one of the two"
        name = self.chat_template
        if name is not None and not is_template(name) and name not in (known := template_names()):
            yield "chat_template", TemplateUnknown(name=name, known=known)
        try:
            date.fromisoformat(self.template_date)
        except ValueError:
            yield "template_date", f"{self.template_date!r} is not a date; write it as 2024-07-26"


@dataclass(frozen=True)
class ChatTemplate:
    """A template's text and where it comes from."""

    text: str
    origin: str
    """Origin of the template for errors: ``chatml``, ``of the tokenizer``, or a path."""

    @cached_property
    def marks_generation(self) -> bool:
        """Return whether generation blocks mark the text that the assistant writes."""
        return _GENERATION.search(self.text) is not None

    def on(self, day: date) -> str:
        """Return the text with ``day`` as the current date in the form that it asks for."""
        forms = {form: day.strftime(form) for _, form in _TODAY.findall(self.text)}
        if not forms:
            return self.text
        return f"{{%- macro strftime_now(form) -%}}{{{{ {forms!r}[form] }}}}{{%- endmacro -%}}{self.text}"


def template_names() -> tuple[str, ...]:
    """Return the names of the chat templates that nxdt ships."""
    names = (entry.name for entry in _SHIPPED.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def named_template(keys: ChatKeys, tokenizer: Tokenizer | None = None) -> ChatTemplate | None:
    """Return the template that the configuration names; ``plain`` with the tokens that a text begins with.

    Raises:
        SpecialTokenMissing: ``data.add_bos`` asks for a token that the tokenizer lacks.
        TemplateUnknown, DataFileNotFound, DataFileUnreadable, TextNotUtf8, HubError: of what is named.
    """
    if keys.chat_template_file is not None:
        file = resolve_path(keys.chat_template_file)
        complete(file)
        if not file.is_file():
            raise DataFileNotFound(key="data.chat_template_file", path=str(keys.chat_template_file))
        return ChatTemplate(decode(file, read_bytes(file)), str(keys.chat_template_file))
    if keys.chat_template is None:
        return None
    if is_template(keys.chat_template):
        return ChatTemplate(keys.chat_template, "data.chat_template")
    template = shipped_template(keys.chat_template)
    if template.origin == _AS_TEXT and tokenizer is not None:
        from nxdt_core.data.tokens import leading_ids  # imports numpy

        begin = tokenizer.spell(leading_ids(tokenizer, add_bos=keys.add_bos))
        return replace(template, text=f"{{{{- {begin!r} }}}}\n{template.text}")
    return template


def is_template(text: str) -> bool:
    """Return whether a value of ``data.chat_template`` is the text of a template rather than a name."""
    return "{{" in text or "{%" in text


def shipped_template(name: str) -> ChatTemplate:
    """Return the text of a chat template that nxdt ships.

    Raises:
        TemplateUnknown: it is none of them.
    """
    names = template_names()
    if name not in names:
        raise TemplateUnknown(name=name, known=names)
    return ChatTemplate(_SHIPPED.joinpath(f"{name}{_SUFFIX}").read_text(encoding="utf-8"), name)
