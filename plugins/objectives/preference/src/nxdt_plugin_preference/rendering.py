"""A prompt and its answers → tokens, and where the answers begin.

The prompt's tokens are those that it has in common, alone, with each conversation: a token that would reach from it
into an answer belongs to the answers, as in TRL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from nxdt_core.data.cache import digest
from nxdt_core.data.chat.conversation import (
    Conversation,
    Message,
    check_order,
    ignored_fields,
    in_order_of_calls,
    merged,
)
from nxdt_core.data.chat.records import (
    check_text_only,
    read_message,
    read_question,
    read_tools,
    unused_fields,
    with_system,
)
from nxdt_core.data.chat.rendering import ReservedTokens, TemplateRunner, end_of_turn, runner_of
from nxdt_core.data.chat.templates import template_names
from nxdt_core.data.files.records import Place, unread
from nxdt_core.data.tokens import leading_ids, with_leading
from nxdt_core.errors.base import listing
from nxdt_core.errors.chats import TemplateMissing, TemplateRefuses
from nxdt_core.protocols.batch import LARGEST
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_plugin_preference.config import UnpairedConfig
from nxdt_plugin_preference.errors import (
    AnswerEmpty,
    AnswerMissing,
    AnswerOfOthers,
    AnswersEqual,
    AnswersInseparable,
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


def read_unpaired(record: Mapping[str, Any], place: Place, *, merge: bool = False) -> Preference:
    """Return the answer of a record and its ``label``: ``completion``, in the forms of :func:`read_preference`, or
    ``chosen`` and ``rejected``, which are one desirable answer and one undesirable.

    Raises:
        LabelMissing: it is not there, or not true or false.
        NxdtError: as of :func:`read_preference`.
    """
    if record.get("completion") is None and record.get("chosen") is not None:
        return replace(read_preference(record, place, merge=merge), scores=(1.0, -1.0))
    preference = _read(record, place, _ONE, ("label",), merge=merge)
    label = record.get("label")
    score = _LABELS.get(str(label).strip().lower())
    if score is None:
        raise LabelMissing(place=str(place), found="is missing" if label is None else f"is {label!r}")
    return replace(preference, scores=(score,))


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
    preference = _read(record, place, _PAIR, ("margin",) if margins else (), merge=merge)
    if not margins:
        return preference
    value = record.get("margin")
    try:
        margin = float(0.0 if value is None else value)
    except (TypeError, ValueError, OverflowError):
        margin = math.nan
    if not abs(margin) <= LARGEST:
        raise BadPreference(place=str(place), key="margin", reason=f"{value!r} is not a number from -1e30 to 1e30")
    return replace(preference, scores=(margin,))


def _read(
    record: Mapping[str, Any], place: Place, keys: Sequence[str], more: tuple[str, ...], *, merge: bool
) -> Preference:
    """Return the prompt and the answers ``keys`` of a record; ``more`` are further keys that the caller reads."""
    check_text_only(record, place)
    texts: dict[str, Text] = {}
    for key in keys:
        if record.get(key) is None:
            wanted = " and ".join(map(repr, keys))
            raise AnswerMissing(place=str(place), key=key, keys=listing(list(record)) or "none", wanted=wanted)
        texts[key] = _text(record[key], key, place)
        if not any(turn.content.strip() or turn.calls for turn in _turns(texts[key], "assistant")[-1:]):
            raise AnswerEmpty(place=str(place), key=key)
    read: tuple[str, ...] = ("prompt", *keys, *more)
    prompt: Text | None = None if record.get("prompt") is None else _text(record["prompt"], "prompt", place)
    if prompt is None:
        fields, question = read_question(record, place)
        read, prompt = (*read, *fields), tuple(question) or _common(texts)
    if merge and not isinstance(prompt, str) and prompt:
        prompt = tuple(merged(prompt))
    if not isinstance(prompt, tuple) and all(isinstance(text, str) for text in texts.values()):
        if not prompt:
            raise PromptMissing(place=str(place), found="the key is not there" if prompt is None else "it is empty")
        _check_differ(texts, place)
        begin = 0 if record.get("prompt") is not None else len(prompt)
        return Preference(
            place=place,
            prompt=prompt,
            answers={key: text[begin:] for key, text in texts.items()},
            unused=tuple(unread(record, ("prompt", *keys, *more))),
        )

    # Messages, whose speakers take turns; the answers are the assistant's.
    answers = {key: _turns(text, "assistant") for key, text in texts.items()}
    if isinstance(prompt, tuple):
        asked, common = prompt, len(prompt)
        if all(len(answer) > common and answer[:common] == prompt for answer in answers.values()):
            answers = {key: answer[common:] for key, answer in answers.items()}  # they are whole conversations
    elif prompt and all(answer[0].role == "assistant" for answer in answers.values()):
        asked = _turns(prompt, "user")
    elif len(answers) == 1:
        raise PromptMissing(place=str(place), found="the key is not there, or 'completion' does not only answer it")
    else:  # the prompt is the messages with which both conversations begin
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
        answers = {key: answer[common:] for key, answer in answers.items()}
    if not asked:
        raise PromptMissing(place=str(place), found="it is empty")
    _check_differ(answers, place)
    asked = tuple(with_system(asked, record, place))
    for key, answer in answers.items():
        for end, turn in (("begins", answer[0]), ("ends", answer[-1])):
            if turn.role != "assistant":
                raise AnswerOfOthers(place=str(place), key=key, end=end, role=turn.role)
        whole = replace(place, part=f"prompt and {key!r}")
        check_order(Conversation(place=whole, messages=[*asked, *answer]))
    turns = [*asked, *(turn for answer in answers.values() for turn in answer)]
    marked = any(turn.train is not None for turn in turns)  # without effect, since both answers always count
    return Preference(
        place=place,
        prompt=asked,
        answers=answers,
        tools=read_tools(record, place),
        unused=(*unused_fields(record, read, turns), *(("messages.train",) if marked else ())),
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
    return chosen[: _shared(chosen, rejected)].removesuffix(" ") or None


def _text(value: Any, key: str, place: Place) -> Text:
    if isinstance(value, str):
        return value
    value = [value] if isinstance(value, dict) else value  # LLaMA-Factory has an answer's one message
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise BadPreference(place=str(place), key=key, reason=f"it is a {type(value).__name__}")
    part = replace(place, part=repr(key))
    messages = [read_message(message, part, number) for number, message in enumerate(value, start=1)]
    return tuple(in_order_of_calls(messages, part))


def _turns(text: Text, role: str) -> Turns:
    return (Message(role=role, content=text),) if isinstance(text, str) else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prompt and its answers, mostly two, in tokens."""

    prompt: list[int]
    answers: tuple[list[int], ...]
    header: int = 0
    """Tokens of the prompt after its last message, such as the beginning of the answer's turn, which ``keep_start``
    does not cut off."""
    scores: tuple[float, ...] = ()
    """Scores of :class:`~nxdt_plugin_preference.rendering.Preference`."""
    cut: bool = False
    """True if the pair was longer."""
    unused: tuple[str, ...] = ()
    """Fields of the record that the tokens do not depend on."""

    @property
    def length(self) -> int:
        """Tokens of the prompt with the longest answer."""
        return len(self.prompt) + max(map(len, self.answers))


class Renderer:
    """Tokenizes pairs.

    Texts begin as :func:`~nxdt_core.data.tokens.leading_ids` says and end with the tokenizer's end token, as far as it
    has one; messages are what the chat template writes. It is looked for when the first messages come by.

    Args:
        tokenizer: the tokenizer of the run.
        keys: choose the template, what messages may spell, and how texts begin and answers end.

    Raises:
        SpecialTokenMissing: ``data.add_bos`` asks for a token that the tokenizer lacks.
    """

    def __init__(self, tokenizer: Tokenizer, keys: UnpairedConfig) -> None:
        self._tokenizer, self._keys = tokenizer, keys
        self._leading = leading_ids(tokenizer, add_bos=keys.add_bos)
        self._template: tuple[TemplateRunner, ReservedTokens] | None = None
        """What renders messages, and the tokens that none may spell."""

    def fingerprint(self) -> str:
        """Digest of all that decided which tokens the pairs became."""
        settings = self._template and self._template[0].settings
        if settings is not None and self._keys.space_after_turns:
            settings = settings, True
        return digest(self._tokenizer.fingerprint(), settings, self._leading)

    def render(self, pair: Preference) -> Pair:
        """Return the tokens of a record.

        Raises:
            NotAChatTokenizer, TemplateMissing, TemplateUnknown, TemplateNeedsToken, TemplateUnreadable,
            DataFileNotFound, DataFileUnreadable, TextNotUtf8: messages cannot be rendered.
            EndOfTurnUntrained: the template does not end the answers.
            TemplateRefuses, AnswersInseparable, AnswersEqual, SpecialTokenInText: of the record; each names the place.
        """
        tokenizer = self._tokenizer
        if isinstance(pair.prompt, str):
            answers = [answer for answer in pair.answers.values() if isinstance(answer, str)]  # all of them
            end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
            texts = [pair.prompt, *(pair.prompt + answer for answer in answers)]
            tokens = _parted([with_leading(ids, self._leading) for ids in tokenizer.encode_batch(texts)], end)
        else:
            tokens = self._rendered(pair, pair.prompt)
        if len(tokens.answers) > 1 and tokens.answers[0] == tokens.answers[1]:
            raise AnswersEqual(place=str(pair.place), where=" in tokens")
        return replace(tokens, scores=pair.scores, unused=(*pair.unused, *tokens.unused))

    def _rendered(self, pair: Preference, prompt: Turns) -> Pair:
        """Return the tokens of a record of messages."""
        tokenizer, place = self._tokenizer, str(pair.place)
        if self._template is None:
            tokenizer.locate([])  # raises where it cannot
            runner = runner_of(self._keys, tokenizer)
            if runner is None:
                raise TemplateMissing(known=template_names(), place=place)
            end_of_turn(runner, tokenizer)
            self._template = runner, ReservedTokens(tokenizer, allowed=self._keys.special_tokens_in_text)
        runner, reserved = self._template
        conversations: dict[str, Turns] = {}
        for key, answer in pair.answers.items():
            assert not isinstance(answer, str)
            conversations[key] = prompt + answer
            reserved.check(((turn.content, turn.fields) for turn in conversations[key]), place, tools=pair.tools)
        try:
            texts, header, ignored = self._texts(runner, pair, prompt, conversations, "")
        except TemplateRefuses as refusal:
            # Some templates know a turn that only calls tools by its content being null.
            if not any(turn.calls and not turn.content for turns in conversations.values() for turn in turns):
                raise
            try:
                texts, header, ignored = self._texts(runner, pair, prompt, conversations, None)
            except TemplateRefuses:
                raise refusal from None
        located = tokenizer.locate(texts)
        tokens = _parted([text.ids.tolist() for text in located])
        begins = located[0].starts[: len(tokens.prompt)]
        return replace(tokens, header=int((begins >= len(texts[0]) - header).sum()), unused=ignored)

    def _texts(
        self,
        runner: TemplateRunner,
        pair: Preference,
        prompt: Turns,
        conversations: Mapping[str, Turns],
        nothing: str | None,
    ) -> tuple[list[str], int, tuple[str, ...]]:
        """Return the prompt alone and each conversation up to the end of its last turn, the characters of the prompt
        after its last message, where the prompt may be cut before them, and what the template ignores.

        Space after the last turn is a part of an answer only where ``data.space_after_turns`` says so."""

        def render(conversation: Conversation, *, prompts: bool = False) -> str:
            messages = [turn.for_template(nothing) for turn in conversation.messages]
            return runner.run(messages, place=str(pair.place), tools=conversation.tools, prompts=prompts)[0]

        def conversation_of(turns: Turns) -> Conversation:
            return Conversation(place=pair.place, messages=turns, tools=pair.tools)

        # Some templates write more to prompt an answer than they keep once it is there, such as an empty thought.
        begins = [render(conversation_of(prompt), prompts=prompts) for prompts in (True, False)]
        header = 0
        if self._keys.truncation_mode == "keep_start":
            other = replace(prompt[-1], content="B" if prompt[-1].content.strip().endswith("A") else "A")
            changed = render(conversation_of((*prompt[:-1], other)), prompts=True)
            ends = zip(reversed(begins[0]), reversed(changed), strict=False)
            header = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))
        texts, ignored = [begins[0]], dict[str, None]()
        for key, turns in conversations.items():
            conversation = conversation_of(turns)
            text = render(conversation)
            begin = next((begin for begin in begins if text.startswith(begin)), None)
            if begin is None:
                raise AnswersInseparable(place=str(pair.place), key=key)
            for number, turn in enumerate(turns[len(prompt) :], start=len(prompt) + 1):
                if turn.role == "assistant" and not turn.is_contained_in(text[len(begin) :]):
                    reason = f"it leaves out what message {number} of prompt and {key!r} says or calls"
                    origin = runner.template.origin
                    raise TemplateRefuses(place=str(pair.place), origin=origin, reason=reason)
            ignored |= dict.fromkeys(ignored_fields(conversation, text, render))
            texts.append(text if self._keys.space_after_turns else text.rstrip())
            follows = "no text follows" if texts[-1] == text else "data.space_after_turns leaves out the space after"
            runner.check_end(turns[-1], texts[-1][len(begin) :], f"{follows} an answer")
        return texts, header, tuple(ignored)


def _parted(ids: Sequence[list[int]], end: Sequence[int] = ()) -> Pair:
    """Return what a prompt alone and with each answer begin with, and what follows in each of the latter."""
    prompt, *conversations = ids
    shared = min(_shared(prompt, whole) for whole in conversations)
    return Pair(prompt=prompt[:shared], answers=tuple([*whole[shared:], *end] for whole in conversations))


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of elements with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (first, second) in pairs if first != second), min(len(one), len(other)))
