"""One record of a file → a prompt and two answers, from the forms in which preferences are published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxdt_core.errors.base import listing
from nxdt_plugin_preference.errors import (
    AnswerEmpty,
    AnswerMissing,
    AnswersEqual,
    BadPreference,
    PromptMissing,
)

__all__ = ["Preference", "Text", "read_preference"]

Text = str | tuple[Mapping[str, Any], ...]
"""A text as it stands, or messages for a chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A prompt and two answers, all texts or all messages."""

    place: str
    prompt: Text
    chosen: Text
    rejected: Text
    tools: Sequence[Mapping[str, Any]] | None = None
    """JSON schemas of functions that the assistant may call."""


def read_preference(record: Mapping[str, Any], place: str) -> Preference:
    """The pair of a record.

    ``prompt``, ``chosen`` and ``rejected`` are texts or lists of messages; an answer that is a text follows a prompt of
    messages as the assistant's turn. Without a prompt of messages, ``chosen`` and ``rejected`` are whole conversations,
    and what they have in common is the prompt.

    Raises:
        AnswerMissing, AnswerEmpty, AnswersEqual, PromptMissing, BadPreference: each names the place.
    """
    answers = {key: _answer(record, key, place) for key in ("chosen", "rejected")}
    prompt = None if record.get("prompt") is None else _text(record["prompt"], "prompt", place)
    if isinstance(prompt, tuple):
        answers = {key: _turn(answer) for key, answer in answers.items()}
    elif any(isinstance(answer, tuple) for answer in answers.values()):
        prompt, answers = _parted(answers, place)
    if not prompt:
        raise PromptMissing(place=place, found="it is empty" if prompt is not None else "the key is not there")
    if answers["chosen"] == answers["rejected"]:
        raise AnswersEqual(place=place)
    return Preference(place=place, prompt=prompt, tools=record.get("tools"), **answers)


def _answer(record: Mapping[str, Any], key: str, place: str) -> Text:
    if record.get(key) is None:
        raise AnswerMissing(place=place, key=key, keys=listing(list(record)) or "none")
    answer = _text(record[key], key, place)
    words = answer if isinstance(answer, str) else "".join(_words(message) for message in answer[-1:])
    if not words.strip():
        raise AnswerEmpty(place=place, key=key)
    return answer


def _words(message: Mapping[str, Any]) -> str:
    """What counts as an answer: words, or a call of a tool."""
    return str(message.get("content") or message.get("tool_calls") or "")


def _text(value: Any, key: str, place: str) -> Text:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise BadPreference(place=place, key=key, reason=f"it is a {type(value).__name__}")
    for number, message in enumerate(value, start=1):
        if not isinstance(message.get("role"), str):
            raise BadPreference(place=place, key=key, reason=f"message {number} has no text under 'role'")
        if not isinstance(message.get("content"), str | None):
            raise BadPreference(place=place, key=key, reason=f"the content of message {number} is no text")
    return tuple(value)


def _turn(answer: Text) -> Text:
    return ({"role": "assistant", "content": answer},) if isinstance(answer, str) else answer


def _parted(answers: Mapping[str, Text], place: str) -> tuple[Text, dict[str, Text]]:
    """The messages with which both conversations begin, and what follows in each."""
    conversations = {key: _turn(answer) for key, answer in answers.items()}
    common = 0
    for one, other in zip(*conversations.values(), strict=False):
        if one != other or common == min(map(len, conversations.values())) - 1:
            break
        common += 1
    if common == 0:
        raise PromptMissing(place=place, found="'chosen' and 'rejected' do not begin alike")
    prompt = conversations["chosen"][:common]
    return prompt, {key: conversation[common:] for key, conversation in conversations.items()}
