"""Errors of conversations and chat templates of any data set: codes ``NXDT-D300`` to ``NXDT-D304``,
``NXDT-D313`` to ``NXDT-D317`` and ``NXDT-D319`` to ``NXDT-D323``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from nxdt_core.errors.base import NxdtError, listing


class UnknownRecord(NxdtError):
    """A record in none of the forms."""

    code = "NXDT-D300"
    happened = "{place}: no conversation; the record's keys are {found}."
    remedy = (
        "A record needs 'messages', 'conversations' (ShareGPT), or a question and an answer such as 'prompt' and "
        "'completion' or 'instruction' and 'output'; data.columns names columns that are called otherwise.{hint}"
    )
    example: ClassVar[Mapping[str, Any]] = {"place": "chats.jsonl:1", "keys": ("question", "reply")}
    place: str
    keys: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        preferences = {"chosen", "rejected"} <= set(self.keys)
        hint = " Chosen and rejected answers are data of an objective such as 'dpo'." if preferences else ""
        return {**super()._view(), "found": listing(self.keys) or "none", "hint": hint}


BadMessage = NxdtError.define(
    "NXDT-D301",
    "A message whose parts are not what they must be.",
    "{place}{which}: {reason}.",
    'A message is an object such as {{"role": "user", "content": "..."}}; correct or remove the record.',
    also=lambda error: {"which": f", message {error.number}" if error.number else ""},
    example={
        "place": "chats.jsonl:1",
        "number": 2,
        "reason": "its content is of type int; only text can be trained on",
    },
)


def _hint(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


UnknownRole = NxdtError.define(
    "NXDT-D302",
    "A speaker that no template knows.",
    "{place}, message {number}: the role {role!r} is unknown.",
    "Roles are {known:list}.{hint}",
    also=lambda error: {"hint": _hint(error.role.lower(), error.known)},
    example={
        "place": "chats.jsonl:1",
        "number": 2,
        "role": "bot",
        "known": ("system", "developer", "user", "assistant", "tool"),
    },
)

RolesOutOfOrder = NxdtError.define(
    "NXDT-D303",
    "A speaker whose turn it is not.",
    "{place}, message {number}: {role!r} {position}, where {allowed:or} must speak.",
    "After an optional system message, user and assistant take turns, the user first; tool messages answer an "
    "assistant's tool calls. Correct or remove the record.",
    also=lambda error: {"position": f"follows {error.before!r}" if error.before else "speaks first"},
    example={"place": "chats.jsonl:1", "number": 2, "role": "user", "before": "user", "allowed": ("assistant",)},
)

EmptyTurn = NxdtError.define(
    "NXDT-D304",
    "An assistant's turn that teaches to say nothing.",
    "{place}, message {number}: the assistant's turn is empty.",
    "Fill it, give it tool calls, or remove the record.",
    example={"place": "chats.jsonl:1", "number": 2},
)

TemplateMissing = NxdtError.define(
    "NXDT-D313",
    "No template to render conversations with.",
    "The tokenizer brings no chat template, and data.chat_template names none{where}.",
    "Set data.chat_template to one of {known:list99}, as the model was or is to be tuned, or data.chat_template_file. "
    "('plain' puts the output right behind the input, as NxD Training does.)",
    defaults={"place": ""},
    also=lambda error: {"where": f" for the messages of {error.place}" if error.place else ""},
)

TemplateUnknown = NxdtError.define(
    "NXDT-D314",
    "A name that no shipped template has.",
    "There is no chat template {name!r} (data.chat_template).",
    "Templates are {known:list99}.{hint} A file is named by data.chat_template_file.",
    also=lambda error: {"hint": _hint(error.name, error.known)},
    example={"name": "chatmll", "known": ("chatml", "gemma", "llama2", "llama3", "mistral", "plain", "zephyr")},
)

TemplateUnreadable = NxdtError.define(
    "NXDT-D315",
    "A template that is not Jinja, or does what the sandbox forbids.",
    "The chat template ({origin}) is invalid: {reason}.",
    "Correct it, or set data.chat_template to a shipped one.",
)


class TemplateRefuses(NxdtError):
    """A conversation that the template does not render."""

    code = "NXDT-D316"
    happened = "{place}: the chat template ({origin}) refuses the conversation: {reason}."
    remedy = "Correct or remove the record, or take a template that renders it (data.chat_template)."
    place: str
    origin: str
    reason: str


TemplateNeedsToken = NxdtError.define(
    "NXDT-D317",
    "A template that writes a token which the tokenizer does not have, so that no turn would end.",
    "The chat template ({origin}) writes {name}, and the tokenizer has no such token.",
    "{way}, or set data.chat_template to one that does not write it.",
    usual_remedy="Set data.chat_template to one whose tokens the tokenizer has, or add them to the tokenizer.",
    also=lambda error: {
        "way": f"Name it under data.tokenizer ({error.name})"
        if error.name.endswith("_token")
        else f"Add {error.name} to the tokenizer and the model's vocabulary"
    },
)

EndOfTurnUntrained = NxdtError.define(
    "NXDT-D319",
    "A template with which the model would never learn to stop.",
    "With the chat template ({origin}) the end of a turn would not be trained: {reason}.",
    "Let a token end the assistant's turns, within the generation block where there are such blocks, or set "
    "data.chat_template to one that does.",
)


class NotAChatTokenizer(NxdtError):
    """A tokenizer that does not return the positions of its tokens in a text."""

    code = "NXDT-D320"
    happened = "The tokenizer ({tokenizer}) does not return the positions of tokens in a text, and chat data need them."
    remedy = "Set data.tokenizer.library: huggingface, and use the tokenizer.json of the same model."
    tokenizer: str


SpecialTokenInText = NxdtError.define(
    "NXDT-D321",
    "A text that spells a special token, which would become one: a turn could end or begin within it.",
    "{place}, {which}: the text spells the special token {token!r}, and would be taken for it.",
    "Remove or rewrite it there, or allow it with data.special_tokens_in_text: true.",
    also=lambda error: {"which": f"message {error.number}" if error.number else "its tools"},
)

FieldsUnused = NxdtError.define(
    "NXDT-D322",
    "Fields of a record that no sample would contain, where that is refused.",
    "{place}: neither the format nor the chat template uses {names:list}.",
    "Remove the fields, set data.chat_template to a template that writes them, or count them with "
    "data.unused_fields: report.",
)

TooManyBadRecords = NxdtError.define(
    "NXDT-D323",
    "More records that cannot be used than may be dropped.",
    "{bad} of {records} records cannot be used, more than data.max_bad_share {share:g} allows. The first: {first:; }",
    "Correct these records, or raise data.max_bad_share.",
)
