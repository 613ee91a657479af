"""One record of a file → a prompt and its answers, from the forms in which preferences are published."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nxdt_core.data.chat.conversation import Conversation, Message, check_order, in_order_of_calls, merged
from nxdt_core.data.chat.records import (
    check_text_only,
    read_message,
    read_question,
    read_tools,
    unused_fields,
    with_system,
)
from nxdt_core.data.files.records import Place, unread
from nxdt_core.errors.base import listing
from nxdt_core.protocols.batch import LARGEST
from nxdt_plugin_preference.errors import (
    AnswerEmpty,
    AnswerMissing,
    AnswerOfOthers,
    AnswersEqual,
    BadPreference,
    LabelMissing,
    PromptDiffers,
    PromptMissing,
)

Turns = tuple[Message, ...]

Text = str | Turns
"""A text to use unchanged, or messages for a chat template."""

_PAIR, _ONE = ("chosen", "rejected"), ("completion",)
_LABELS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": -1.0, "0": -1.0, "0.0": -1.0}
"""Scores by the text of a label: tables have texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A prompt and its answers, all texts or all messages."""

    place: Place
    prompt: Text
    answers: Mapping[str, Text]
    """Answers by key of the record: ``chosen`` and ``rejected``, or ``completion``."""
    scores: tuple[float, ...] = ()
    """Margin of a pair; for single answers, 1 or −1 for each."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """JSON schemas of functions that the assistant may call."""
    unused: tuple[str, ...] = ()
    """Fields of the record that are not part of the pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part(Place):
    """Location of messages in a record."""

    part: str

    def __str__(self) -> str:
        return f"{Place.__str__(self)}, {self.part}"


def read_unpaired(record: Mapping[str, Any], place: Place, *, merge: bool = False) -> Preference:
    """Return the answer of a record and its ``label``: ``completion``, in the forms of :func:`read_preference`, or
    ``chosen`` and ``rejected``, which are one desirable answer and one undesirable.

    Raises:
        LabelMissing: it is not there, or not true or false.
        NxdtError: as of :func:`read_preference`.
    """
    if record.get("completion") is None and record.get("chosen") is not None:
        return replace(read_preference(record, place, merge=merge), scores=(1.0, -1.0))
    found = _read(record, place, _ONE, ("label",), merge=merge)
    label = record.get("label")
    score = _LABELS.get(str(label).strip().lower())
    if score is None:
        raise LabelMissing(place=str(place), found="is missing" if label is None else f"is {label!r}")
    return replace(found, scores=(score,))


def read_preference(
    record: Mapping[str, Any], place: Place, *, merge: bool = False, margins: bool = False
) -> Preference:
    """Return the pair of a record.

    ``prompt``, ``chosen`` and ``rejected`` are texts or lists of messages. An answer that is a text is a turn of the
    assistant where others are messages; a prompt that is a text is one of the user where answers begin with the
    assistant. Answers that begin with the prompt's messages, or without such a prompt with the same messages, are whole
    conversations, and what they have in common is the prompt. So is the common beginning of two texts without a prompt,
    as in TRL. In place of ``prompt`` there may be a conversation or a question, as of
    :func:`~nxdt_core.data.chat.records.read_question`. ``merge`` joins the prompt's messages that are out of turn.
    ``margins`` reads the number ``margin``, which is 0 where there is none.

    Raises:
        AnswerMissing, AnswerEmpty, AnswersEqual, AnswerOfOthers, PromptMissing, PromptDiffers, BadPreference: each
            names the place.
        BadMessage, UnknownRole, RolesOutOfOrder, EmptyTurn: of messages; each names the place and the message.
    """
    found = _read(record, place, _PAIR, ("margin",) if margins else (), merge=merge)
    return replace(found, scores=(_margin(record, place),)) if margins else found


def _margin(record: Mapping[str, Any], place: Place) -> float:
    value = record.get("margin")
    try:
        margin = float(0.0 if value is None else value)
    except (TypeError, ValueError, OverflowError):
        margin = math.nan
    if not abs(margin) <= LARGEST:
        raise BadPreference(place=str(place), key="margin", reason=f"{value!r} is not a number from -1e30 to 1e30")
    return margin


def _read(
    record: Mapping[str, Any], place: Place, keys: Sequence[str], more: tuple[str, ...], *, merge: bool
) -> Preference:
    """The prompt and the answers ``keys`` of a record; ``more`` are further keys that the caller reads."""
    check_text_only(record, place)
    answers = {key: _answer(record, key, place, keys) for key in keys}
    known = ("prompt", *keys, *more)
    read: tuple[str, ...] = known
    prompt: Text | None = None if record.get("prompt") is None else _text(record["prompt"], "prompt", place)
    if prompt is None:
        asked, question = read_question(record, place)
        read, prompt = (*known, *asked), tuple(question) or _common(answers)
    if merge and not isinstance(prompt, str) and prompt:
        prompt = tuple(merged(prompt))
    if isinstance(prompt, tuple) or any(isinstance(answer, tuple) for answer in answers.values()):
        turns = {key: _turns(answer, "assistant") for key, answer in answers.items()}
        return _conversation(record, read, prompt, turns, place)
    if not prompt:
        raise PromptMissing(place=str(place), found="the key is not there" if prompt is None else "it is empty")
    _check_differ(answers, place)
    begin = 0 if record.get("prompt") is not None else len(prompt)
    return Preference(
        place=place,
        prompt=prompt,
        answers={key: answer[begin:] for key, answer in answers.items()},
        unused=tuple(unread(record, known)),
    )


def _check_differ(answers: Mapping[str, Text], place: Place) -> None:
    if len(answers) > 1 and answers["chosen"] == answers["rejected"]:
        raise AnswersEqual(place=str(place))


def _common(answers: Mapping[str, Text]) -> str | None:
    """Return the text with which both answers begin, without a space at its end; None where there is none.

    The rule of TRL's ``extract_prompt``."""
    if len(answers) == 1:
        return None
    chosen, rejected = answers.values()
    if not isinstance(chosen, str) or not isinstance(rejected, str) or chosen == rejected:
        return None
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shared = next((at for at, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))
    return chosen[:shared].removesuffix(" ") or None


def _answer(record: Mapping[str, Any], key: str, place: Place, keys: Sequence[str]) -> Text:
    if record.get(key) is None:
        wanted = " and ".join(map(repr, keys))
        raise AnswerMissing(place=str(place), key=key, keys=listing(list(record)) or "none", wanted=wanted)
    answer = _text(record[key], key, place)
    if not any(turn.content.strip() or turn.calls_tools for turn in _turns(answer, "assistant")[-1:]):
        raise AnswerEmpty(place=str(place), key=key)
    return answer


def _text(value: Any, key: str, place: Place) -> Text:
    if isinstance(value, str):
        return value
    value = [value] if isinstance(value, dict) else value  # LLaMA-Factory has an answer's one message
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise BadPreference(place=str(place), key=key, reason=f"it is a {type(value).__name__}")
    part = _part(place, repr(key))
    messages = [read_message(message, part, number) for number, message in enumerate(value, start=1)]
    return tuple(in_order_of_calls(messages, part))


def _turns(text: Text, role: str) -> Turns:
    return (Message(role=role, content=text),) if isinstance(text, str) else text


def _part(place: Place, part: str) -> Place:
    return _Part(path=place.path, number=place.number, part=part)


def _conversation(
    record: Mapping[str, Any],
    read: Sequence[str],
    prompt: Text | None,
    answers: Mapping[str, Turns],
    place: Place,
) -> Preference:
    """The prompt and answers of a record of messages, whose speakers take turns; the answers are the assistant's."""
    if prompt is not None and not isinstance(prompt, str):
        asked, answers = prompt, _behind(prompt, answers)
    elif prompt and all(answer[0].role == "assistant" for answer in answers.values()):
        asked = _turns(prompt, "user")
    elif len(answers) == 1:
        raise PromptMissing(place=str(place), found="the key is not there, or 'completion' does not only answer it")
    else:
        asked, answers = _parted(answers, prompt, place)
    if not asked:
        raise PromptMissing(place=str(place), found="it is empty")
    _check_differ(answers, place)
    asked = tuple(with_system(asked, record, place))
    for key, answer in answers.items():
        for end, turn in (("begins", answer[0]), ("ends", answer[-1])):
            if turn.role != "assistant":
                raise AnswerOfOthers(place=str(place), key=key, end=end, role=turn.role)
        check_order(Conversation(place=_part(place, f"prompt and {key!r}"), messages=[*asked, *answer]))
    turns = [*asked, *(turn for answer in answers.values() for turn in answer)]
    return Preference(
        place=place,
        prompt=asked,
        answers=answers,
        tools=read_tools(record, place),
        unused=(*unused_fields(record, read, turns), *_marked(turns)),
    )


def _marked(turns: Sequence[Message]) -> tuple[str, ...]:
    """Return the name of the mark that leaves a message out of the loss or puts it in: both answers always count."""
    return ("messages.train",) if any(turn.train is not None for turn in turns) else ()


def _behind(prompt: Turns, answers: Mapping[str, Turns]) -> Mapping[str, Turns]:
    """The answers without the prompt, where both are whole conversations that begin with it."""
    count = len(prompt)
    if all(len(answer) > count and answer[:count] == prompt for answer in answers.values()):
        return {key: answer[count:] for key, answer in answers.items()}
    return answers


def _parted(answers: Mapping[str, Turns], prompt: str | None, place: Place) -> tuple[Turns, Mapping[str, Turns]]:
    """The messages with which both conversations begin, ``prompt`` the user's last one, and what follows in each."""
    common = 0
    for one, other in zip(*answers.values(), strict=False):
        if one != other or common == min(map(len, answers.values())) - 1:
            break
        common += 1
    asked = answers["chosen"][:common]
    said = next((turn.content for turn in reversed(asked) if turn.role == "user"), "")
    if prompt and prompt.strip() != said.strip():
        raise PromptDiffers(place=str(place))
    if not asked:
        raise PromptMissing(place=str(place), found="'chosen' and 'rejected' do not begin with the same messages")
    return asked, {key: answer[common:] for key, answer in answers.items()}
