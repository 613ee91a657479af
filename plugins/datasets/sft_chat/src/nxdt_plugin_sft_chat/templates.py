"""Which chat template a run takes: the tokenizer's own, one of this package by name, or a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from importlib.resources import files
from pathlib import Path

from nxdt_core.data.files import decode, read_bytes
from nxdt_core.errors import DataFileNotFound
from nxdt_core.protocols.tokenizer import ChatTokenizer
from nxdt_plugin_sft_chat.config import ChatConfig
from nxdt_plugin_sft_chat.errors import TemplateMissing, TemplateNeedsToken, TemplateUnknown

__all__ = ["ChatTemplate", "find_template", "template_names"]

_SUFFIX = ".jinja"
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
        """The text with ``day`` as the current date in whatever form it asks for it."""
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
    """Templates of this package."""
    names = (entry.name for entry in files(__package__).joinpath("templates").iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def find_template(config: ChatConfig, tokenizer: ChatTokenizer) -> ChatTemplate:
    """The template that the configuration names, else the tokenizer's.

    Raises:
        TemplateUnknown, DataFileNotFound, DataFileUnreadable, TextNotUtf8: of what is named.
        TemplateMissing: nothing is named, and the tokenizer has none.
    """
    if config.chat_template_file is not None:
        return _from_file(config.chat_template_file)
    if config.chat_template is not None:
        return _named(config.chat_template)
    own = tokenizer.chat_template()
    if own is None:
        raise TemplateMissing(known=template_names())
    return ChatTemplate(own, "of the tokenizer")


def _named(name: str) -> ChatTemplate:
    known = template_names()
    if name not in known:
        raise TemplateUnknown(name=name, known=known)
    path = files(__package__).joinpath("templates", f"{name}{_SUFFIX}")
    return ChatTemplate(path.read_text(encoding="utf-8"), name)


def _from_file(path: Path) -> ChatTemplate:
    if not path.is_file():
        raise DataFileNotFound(key="data.chat_template_file", path=str(path))
    return ChatTemplate(decode(path, read_bytes(path)), str(path))
