"""Errors of chat data: codes ``NXDT-D306``, ``NXDT-D310`` to ``NXDT-D312`` and ``NXDT-D318``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors import NxdtError

__all__ = [
    "ChatTooLong",
    "EmptySplit",
    "EverythingTrained",
    "NothingTrained",
    "TurnsInseparable",
]


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
    """A conversation whose rendered text does not show the position of a trained message."""

    code = "NXDT-D318"
    happened = "{place}, message {number}: the chat template ({origin}) does not show its position: {reason}."
    remedy = (
        "Mark what the assistant says with generation blocks in the template, set data.train_turns to last, or take "
        "another data.chat_template."
    )
    place: str
    number: int
    origin: str
    reason: str
