"""Errors of judging a model by what it writes: codes ``NXDT-E…``."""

from __future__ import annotations

from nxdt_core.errors.base import NxdtError

__all__ = [
    "ChatTemplateMissing",
    "NoAnswerToJudge",
    "NothingToJudge",
    "QuestionTooLong",
]


class ChatTemplateMissing(NxdtError):
    """Messages, and nothing that says how they are written."""

    code = "NXDT-E001"
    happened = "{place} has messages, and the tokenizer brings no chat template."
    remedy = "Take a tokenizer with a template, or name one where the data's section has a key for it."
    place: str


class NoAnswerToJudge(NxdtError):
    """A record without a question and a wanted answer."""

    code = "NXDT-E003"
    happened = "{place} cannot be judged: {reason}."
    remedy = (
        "Give 'messages' or 'conversations' that end with the assistant's turn, 'input' and 'output', or 'prompt' and "
        "'answer'."
    )
    place: str
    reason: str


class NothingToJudge(NxdtError):
    """Neither records nor tasks."""

    code = "NXDT-E004"
    happened = "There is nothing to judge by: {found}."
    remedy = "Name files with held-out records, or tasks with --task."
    found: str


class QuestionTooLong(NxdtError):
    """A question so long that the model would see only its end."""

    code = "NXDT-E009"
    happened = (
        "The question of {place} has {tokens} tokens, and the model sees {window} at once (data.seq_length "
        "of its run), what it answers included."
    )
    remedy = "Shorten the question or leave the record out (--limit takes the first records alone)."
    place: str
    tokens: int
    window: int
