"""Errors of conversations and chat templates of any data set: codes ``NXDT-D300`` to ``NXDT-D304``,
``NXDT-D313`` to ``NXDT-D317`` and ``NXDT-D319`` to ``NXDT-D322``."""

from __future__ import annotations

import difflib
from typing import Any

from nxdt_core.errors.base import NxdtError, listing, one_of

__all__ = [
    "BadMessage",
    "EmptyTurn",
    "EndOfTurnUntrained",
    "FieldsUnused",
    "NotAChatTokenizer",
    "RolesOutOfOrder",
    "SpecialTokenInText",
    "TemplateMissing",
    "TemplateNeedsToken",
    "TemplateRefuses",
    "TemplateUnknown",
    "TemplateUnreadable",
    "UnknownRecord",
    "UnknownRole",
]


class UnknownRecord(NxdtError):
    """A record in none of the forms."""

    code = "NXDT-D300"
    happened = "{place}: no conversation; the record's keys are {found}."
    remedy = (
        "A record needs 'messages', 'conversations' (ShareGPT), 'input' and 'output', or 'instruction' and 'output'."
        "{hint}"
    )
    place: str
    keys: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        preferences = {"chosen", "rejected"} <= set(self.keys)
        hint = " Chosen and rejected answers are data of an objective such as 'dpo'." if preferences else ""
        if {"prompt", "completion"} <= set(self.keys):
            hint = " Rename 'prompt' and 'completion' to 'input' and 'output' where they are texts."
        return {**super()._view(), "found": listing(self.keys) or "none", "hint": hint}


class BadMessage(NxdtError):
    """A message whose parts are not what they must be."""

    code = "NXDT-D301"
    happened = "{place}{which}: {reason}."
    remedy = 'A message is an object such as {{"role": "user", "content": "..."}}; correct or remove the record.'
    place: str
    number: int
    """From 1; 0 where it is the record as a whole."""
    reason: str

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "which": f", message {self.number}" if self.number else ""}


class UnknownRole(NxdtError):
    """A speaker that no template knows."""

    code = "NXDT-D302"
    happened = "{place}, message {number}: the role {role!r} is unknown."
    remedy = "Roles are {roles}.{hint}"
    place: str
    number: int
    role: str
    known: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        close = difflib.get_close_matches(self.role.lower(), self.known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return {**super()._view(), "roles": listing(self.known), "hint": hint}


class RolesOutOfOrder(NxdtError):
    """A speaker whose turn it is not."""

    code = "NXDT-D303"
    happened = "{place}, message {number}: {role!r} {position}, where {wanted} must speak."
    remedy = (
        "After an optional system message, user and assistant take turns, the user first; tool messages answer an "
        "assistant's tool calls. Correct or remove the record."
    )
    place: str
    number: int
    role: str
    before: str
    """Role of the previous message; empty for the first."""
    allowed: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        position = f"follows {self.before!r}" if self.before else "speaks first"
        return {**super()._view(), "position": position, "wanted": one_of(self.allowed)}


class EmptyTurn(NxdtError):
    """An assistant's turn that teaches to say nothing."""

    code = "NXDT-D304"
    happened = "{place}, message {number}: the assistant's turn is empty."
    remedy = "Fill it, give it tool calls, or remove the record."
    place: str
    number: int


class TemplateMissing(NxdtError):
    """No template to render conversations with."""

    code = "NXDT-D313"
    happened = "The tokenizer brings no chat template, and data.chat_template names none{where}."
    remedy = (
        "Set data.chat_template to one of {names}, as the model was or is to be tuned, or data.chat_template_file. "
        "('plain' puts the output right behind the input, as NxD Training does.)"
    )
    known: tuple[str, ...]
    place: str = ""
    """Of the messages, where not all records have some."""

    def _view(self) -> dict[str, Any]:
        where = f" for the messages of {self.place}" if self.place else ""
        return {**super()._view(), "names": listing(self.known, limit=len(self.known)), "where": where}


class TemplateUnknown(NxdtError):
    """A name that no shipped template has."""

    code = "NXDT-D314"
    happened = "data.chat_template: there is no template {name!r}."
    remedy = "Templates are {names}.{hint} A file is named by data.chat_template_file."
    name: str
    known: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        close = difflib.get_close_matches(self.name, self.known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return {**super()._view(), "names": listing(self.known, limit=len(self.known)), "hint": hint}


class TemplateUnreadable(NxdtError):
    """A template that is not Jinja, or does what the sandbox forbids."""

    code = "NXDT-D315"
    happened = "The chat template ({origin}) is invalid: {reason}."
    remedy = "Correct it, or set data.chat_template to a shipped one."
    origin: str
    reason: str


class TemplateRefuses(NxdtError):
    """A conversation that the template does not render."""

    code = "NXDT-D316"
    happened = "{place}: the chat template ({origin}) refuses the conversation: {reason}."
    remedy = "Correct or remove the record, or take a template that renders it (data.chat_template)."
    place: str
    origin: str
    reason: str


class TemplateNeedsToken(NxdtError):
    """A template that writes a token which the tokenizer does not have, so that no turn would end."""

    code = "NXDT-D317"
    happened = "The chat template ({origin}) writes {name}, and the tokenizer has no such token."
    remedy = "{way}, or set data.chat_template to one that does not write it."
    usual_remedy = "Set data.chat_template to one whose tokens the tokenizer has, or add them to the tokenizer."
    origin: str
    name: str
    """``eos_token``, or the token as it is written."""

    def _view(self) -> dict[str, Any]:
        named = self.name.endswith("_token")
        way = "Name it under data.tokenizer ({})" if named else "Add {} to the tokenizer and the model's vocabulary"
        return {**super()._view(), "way": way.format(self.name)}


class EndOfTurnUntrained(NxdtError):
    """A template with which the model would never learn to stop."""

    code = "NXDT-D319"
    happened = "With the chat template ({origin}) the end of a turn would not be trained: {reason}."
    remedy = (
        "Let a token end the assistant's turns, within the generation block where there are such blocks, or set "
        "data.chat_template to one that does."
    )
    origin: str
    reason: str


class NotAChatTokenizer(NxdtError):
    """A tokenizer that does not return the positions of its tokens in a text."""

    code = "NXDT-D320"
    happened = "The tokenizer ({tokenizer}) does not return the positions of tokens in a text, and chat data need them."
    remedy = "Set data.tokenizer.library: huggingface, and use the tokenizer.json of the same model."
    tokenizer: str


class SpecialTokenInText(NxdtError):
    """A text that spells a special token, which would become one: a turn could end or begin within it."""

    code = "NXDT-D321"
    happened = "{place}, {which}: the text spells the special token {token!r}, and would be taken for it."
    remedy = "Remove or rewrite it there, or allow it with data.special_tokens_in_text: true."
    place: str
    number: int
    """Of the message, from 1; 0 where it is one of the functions that may be called."""
    token: str

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "which": f"message {self.number}" if self.number else "its tools"}


class FieldsUnused(NxdtError):
    """Fields of a record that no sample would contain, where that is refused."""

    code = "NXDT-D322"
    happened = "{place}: neither the format nor the chat template uses {found}."
    remedy = (
        "Remove the fields, set data.chat_template to a template that writes them, or count them with "
        "data.unused_fields: report."
    )
    place: str
    names: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "found": listing(self.names)}
