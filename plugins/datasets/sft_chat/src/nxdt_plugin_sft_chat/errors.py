"""Errors of chat data: codes ``NXDT-D306``, ``NXDT-D310`` to ``NXDT-D312`` and ``NXDT-D318``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError

EmptySplit = NxdtError.define(
    "NXDT-D306",
    "A share of so few records that one side gets none.",
    "data.validation_fraction {fraction} of {records} records leaves none to {split}.",
    "Change the share, name data.validation_files, or set data.validation_fraction to 0 to train without validation.",
)

ChatTooLong = NxdtError.define(
    "NXDT-D310",
    "Conversations that do not fit into a sequence, where that is refused.",
    "{place}: the conversation has {tokens} tokens; sequences of {seq_length} hold {longest_held}. It is the first "
    "of {count} so long; the longest has {longest}.",
    "Raise data.seq_length, or set data.truncation: drop leaves them out, keep_start and keep_end cut their end "
    "or their start off.",
    also=lambda error: {"longest_held": error.seq_length + 1},
    example={"place": "chats.jsonl:1", "tokens": 919, "seq_length": 512, "count": 2, "longest": 1219},
)

NothingTrained = NxdtError.define(
    "NXDT-D311",
    "A conversation or a split without a token that the loss is on.",
    "Nothing of {place} would be trained: {reason}.",
    "See what is rendered with 'nxdt data preview'; data.train_roles, data.train_turns and 'train' decide. A "
    "conversation with 'weight': 0 is left out without an error.",
)

EverythingTrained = NxdtError.define(
    "NXDT-D312",
    "A split whose prompts would be trained too.",
    "All {tokens} tokens of the {split} data would be trained, prompts included.",
    "Take a template that tells turns apart, or narrow data.train_roles; plain text is data of another plugin.",
)


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
