"""Errors of judging a model by what it writes: codes ``NXDT-E…``."""

from __future__ import annotations

from nxdt_core.errors.base import NxdtError

ChatTemplateMissing = NxdtError.define(
    "NXDT-E001",
    "Messages, and nothing that says how they are written.",
    "{place} has messages, and the tokenizer brings no chat template.",
    "Take a tokenizer with a template, or name one where the data's section has a key for it.",
)

NoAnswerToJudge = NxdtError.define(
    "NXDT-E003",
    "A record without a question and a wanted answer.",
    "{place} cannot be judged: {reason}.",
    "Give 'messages' or 'conversations' that end with the assistant's turn, 'input' and 'output', or 'prompt' and "
    "'answer'.",
)

PromptMissing = NxdtError.define(
    "NXDT-E011",
    "A record without a prompt.",
    "{place} has neither a text 'prompt' nor a list 'messages'.",
    "Give each record one of the two.",
)

NothingToJudge = NxdtError.define(
    "NXDT-E004",
    "Neither records nor tasks.",
    "There is nothing to evaluate: {found}.",
    "Name files with held-out records, or tasks with --task.",
)

QuestionTooLong = NxdtError.define(
    "NXDT-E009",
    "A question so long that the model would see only its end.",
    "The question of {place} has {tokens} tokens, and the model sees {window} at once (its positions, or --window), "
    "what it answers included.",
    "Shorten the question or leave the record out (--limit takes the first records alone).",
)
