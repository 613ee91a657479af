"""Which chat template a run takes: the tokenizer's own, a shipped one by name, its text, or a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from importlib.resources import files
from pathlib import Path

from nxdt_core.config.sources.paths import resolve_path
from nxdt_core.data.chat.keys import ChatKeys
from nxdt_core.data.files.paths import decode, read_bytes
from nxdt_core.errors.chats import TemplateNeedsToken, TemplateUnknown
from nxdt_core.errors.data import DataFileNotFound
from nxdt_core.protocols.tokenizer import ChatTokenizer

__all__ = ["ChatTemplate", "find_template", "is_template", "named_template", "shipped_template", "template_names"]

_SUFFIX = ".jinja"
_SHIPPED = files(__package__).joinpath("shipped_templates")
_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
_TODAY = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1")


@dataclass(frozen=True)
class ChatTemplate:
    """A template's text and where it comes from."""

    text: str
    origin: str
    """For errors: ``chatml``, ``of the tokenizer``, or a path."""

    @cached_property
    def marks_generation(self) -> bool:
        """Whether generation blocks say what the assistant writes."""
        return _GENERATION.search(self.text) is not None

    def on(self, day: date) -> str:
        """Return the text with ``day`` as the current date in the form that it asks for."""
        forms = {form: day.strftime(form) for _, form in _TODAY.findall(self.text)}
        if not forms:
            return self.text
        return f"{{%- macro strftime_now(form) -%}}{{{{ {forms!r}[form] }}}}{{%- endmacro -%}}{self.text}"

    def check_tokens(self, special_tokens: Mapping[str, str]) -> None:
        """Let a template pass whose begin and end tokens the tokenizer has.

        Raises:
            TemplateNeedsToken: it writes one that the tokenizer does not name. (Jinja would write nothing.)
        """
        for name in ("eos_token", "bos_token"):
            if re.search(rf"\b{name}\b", self.text) and name not in special_tokens:
                raise TemplateNeedsToken(origin=self.origin, name=name)


def template_names() -> tuple[str, ...]:
    """Return the names of the chat templates that nxdt ships."""
    names = (entry.name for entry in _SHIPPED.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def find_template(keys: ChatKeys, tokenizer: ChatTokenizer) -> ChatTemplate | None:
    """Return the template that the configuration names, else the tokenizer's; None where it has none, either.

    Raises:
        NxdtError: as of :func:`named_template`.
    """
    named = named_template(keys)
    if named is not None:
        return named
    text = tokenizer.chat_template()
    return None if text is None else ChatTemplate(text, "of the tokenizer")


def named_template(keys: ChatKeys) -> ChatTemplate | None:
    """Return the template that the configuration names.

    Raises:
        TemplateUnknown, DataFileNotFound, DataFileUnreadable, TextNotUtf8: of what is named.
    """
    if keys.chat_template_file is not None:
        return _from_file(keys.chat_template_file)
    if keys.chat_template is None:
        return None
    if is_template(keys.chat_template):
        return ChatTemplate(keys.chat_template, "data.chat_template")
    return shipped_template(keys.chat_template)


def is_template(text: str) -> bool:
    """Return whether a value of ``data.chat_template`` is the text of a template rather than a name."""
    return "{{" in text or "{%" in text


def shipped_template(name: str) -> ChatTemplate:
    """Return the text of a chat template that nxdt ships.

    Raises:
        TemplateUnknown: it is none of them.
    """
    known = template_names()
    if name not in known:
        raise TemplateUnknown(name=name, known=known)
    return ChatTemplate(_SHIPPED.joinpath(f"{name}{_SUFFIX}").read_text(encoding="utf-8"), name)


def _from_file(path: Path) -> ChatTemplate:
    found = resolve_path(path)
    if not found.is_file():
        raise DataFileNotFound(key="data.chat_template_file", path=str(path))
    return ChatTemplate(decode(found, read_bytes(found)), str(path))
