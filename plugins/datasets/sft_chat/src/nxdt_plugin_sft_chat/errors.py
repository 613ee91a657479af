"""Errors of chat data: codes ``NXDT-D300`` to ``NXDT-D312`` and ``NXDT-D318`` to ``NXDT-D319``."""

from __future__ import annotations

import difflib
from typing import Any

from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import listing
from nxdt_plugin_sft_chat.config import ROLES

__all__ = [
    "BadMessage",
    "ChatTooLong",
    "EmptySplit",
    "EmptyTurn",
    "EndOfTurnUntrained",
    "EverythingTrained",
    "NothingTrained",
    "RolesOutOfOrder",
    "TurnsInseparable",
    "UnknownRecord",
    "UnknownRole",
]


class UnknownRecord(NxdtError):
    """A record in none of the forms."""

    code = "NXDT-D300"
    happened = "{place}: no conversation; the record's keys are {found}."
    remedy = "A record needs 'messages', 'conversations' (ShareGPT), or 'input' and 'output'.{hint}"
    place: str
    keys: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        preferences = {"chosen", "rejected"} <= set(self.keys)
        hint = " Chosen and rejected answers are data of an objective such as 'dpo'." if preferences else ""
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

    def _view(self) -> dict[str, Any]:
        close = difflib.get_close_matches(self.role.lower(), ROLES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return {**super()._view(), "roles": listing(ROLES), "hint": hint}


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
    """Who spoke before; empty for nobody."""
    allowed: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        position = f"follows {self.before!r}" if self.before else "speaks first"
        return {**super()._view(), "position": position, "wanted": " or ".join(map(repr, self.allowed))}


class EmptyTurn(NxdtError):
    """An assistant's turn that teaches to say nothing."""

    code = "NXDT-D304"
    happened = "{place}, message {number}: the assistant's turn is empty."
    remedy = "Fill it, give it tool calls, or remove the record."
    place: str
    number: int


class EmptySplit(NxdtError):
    """A share of so few records that one side gets none."""

    code = "NXDT-D306"
    happened = "data.validation_fraction {fraction} of {records} records leaves none to {split}."
    remedy = "Change the share, or name data.validation_files."
    fraction: float
    records: int
    split: str


class ChatTooLong(NxdtError):
    """Conversations that do not fit into a sequence, where that is refused."""

    code = "NXDT-D310"
    happened = (
        "{place}: the conversation has {tokens} tokens; sequences of {seq_length} hold {longest_held}. It is the first "
        "of {count} so long; the longest has {longest}."
    )
    remedy = (
        "Raise data.seq_length, or set data.truncation: drop leaves them out, keep_start and keep_end cut their end "
        "or their start off."
    )
    place: str
    tokens: int
    seq_length: int
    count: int
    longest: int

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "longest_held": self.seq_length + 1}


class NothingTrained(NxdtError):
    """A split without a token that the loss is on."""

    code = "NXDT-D311"
    happened = "Nothing of the {split} data would be trained: {reason}."
    remedy = "See what is rendered with 'nxdt data preview'; data.train_roles, data.train_turns and 'train' decide."
    split: str
    reason: str


class EverythingTrained(NxdtError):
    """A split whose prompts would be trained too."""

    code = "NXDT-D312"
    happened = "All {tokens} tokens of the {split} data would be trained, prompts included."
    remedy = "Take a template that tells turns apart, or narrow data.train_roles; plain text is data of another plugin."
    split: str
    tokens: int


class TurnsInseparable(NxdtError):
    """A conversation in whose rendering a trained message cannot be found."""

    code = "NXDT-D318"
    happened = "{place}, message {number}: the chat template ({origin}) does not show where it lies: {reason}."
    remedy = (
        "Mark what the assistant says with generation blocks in the template, set data.train_turns to last, or take "
        "another data.chat_template."
    )
    place: str
    number: int
    origin: str
    reason: str


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
