"""Messages → text by a chat template, in a sandbox; and the tokens of a question."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import cached_property
from typing import Any

from nxdt_core.data.chat.conversation import REASONING, Message
from nxdt_core.data.chat.templates import ChatKeys, ChatTemplate, named_template
from nxdt_core.errors import NxdtError
from nxdt_core.errors.chats import (
    EndOfTurnUntrained,
    SpecialTokenInText,
    TemplateNeedsToken,
    TemplateRefuses,
    TemplateUnreadable,
)
from nxdt_core.errors.data import ChatTemplateMissing, DataLibraryMissing
from nxdt_core.protocols.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]

Span = tuple[int, int]
"""First character, and the one behind the last."""

_MOST_SECONDS = 10
"""Time limit for rendering one conversation; a long one takes milliseconds."""
_MOST_CHARACTERS = 100_000_000
"""Largest length of one rendered conversation."""

_ANSWER = "This one"
"""Answer of a conversation that shows what follows an answer."""
_TOKEN = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
"""A special token, by its look."""


class TemplateRunner:
    """Renders conversations with one chat template.

    Args:
        template: the template.
        special_tokens: as it may call them (``eos_token``, …).
        options: further variables.
        day: the date that it sees as today; None: the real one.
    """

    def __init__(
        self,
        template: ChatTemplate,
        special_tokens: Mapping[str, str],
        options: Mapping[str, Any] | None = None,
        day: date | None = None,
    ) -> None:
        self.template = template
        self._source = template.text if day is None else template.on(day)
        self._variables = {**special_tokens, **(options or {})}

    @property
    def settings(self) -> object:
        """Return all that decides which text messages become; by its ``repr``."""
        return self._source, sorted(self._variables.items())

    def run(
        self,
        messages: Messages,
        *,
        place: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompts: bool = False,
        marks: bool = False,
    ) -> tuple[str, list[Span]]:
        """Return the text of ``messages``, and the spans of its generation blocks.

        Args:
            messages: of one conversation, each with ``role`` and ``content``. Calls of tools have their arguments as
                objects; a template that cannot write these as JSON gets the JSON.
            place: of the conversation, for errors.
            tools: JSON schemas of the functions that the assistant may call.
            prompts: append the beginning of the assistant's next turn.
            marks: look for generation blocks.

        Raises:
            TemplateUnreadable: the template is invalid.
            TemplateRefuses: it raises an exception for these messages, does not end, or makes texts without end.
            DataLibraryMissing: transformers is not installed.
        """
        try:
            plain = _plain(messages)
            calls = (call["function"] for message in plain for call in message.get("tool_calls") or ())
            functions = [call for call in calls if isinstance(call.get("arguments"), dict)]
            objects = [str(call["arguments"]) for call in functions if call["arguments"]]
            refusal = None
            try:
                first = self._render(plain, place, tools, prompts, marks)
                if not any(item in first[0] for item in objects):
                    return first
            except TemplateRefuses as error:
                refusal = error
                if not functions:
                    raise
            # The template fails at objects, or does not write them as JSON: again with arguments as texts.
            for call in functions:
                call["arguments"] = json.dumps(call["arguments"], ensure_ascii=False)
            with suppress(TemplateRefuses):
                other = self._render(plain, place, tools, prompts, marks)
                if refusal or not any(item in other[0] for item in objects):
                    return other
            if refusal:
                raise refusal
            return first
        except RecursionError as error:
            raise TemplateRefuses(place=place, origin=self.template.origin, reason=str(error)) from error

    def check_end(self, message: Message, said: str, reason: str) -> None:
        """Check that ``said``, what is trained of the assistant's turn ``message``, ends with what closes the turn.

        Raises:
            EndOfTurnUntrained: it does not; has the ``reason``.
        """
        # A turn that calls may end with what closes the call, and not the turn, where no text follows answers.
        if message.ends(said) or (message.calls and self._after_answer == ""):
            raise EndOfTurnUntrained(origin=self.template.origin, reason=reason)

    @cached_property
    def _after_answer(self) -> str | None:
        """The text that follows an answer; None where it cannot be seen."""
        asked = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": _ANSWER}]
        try:
            _, answer, behind = self.run(asked, place="the end of a turn")[0].rpartition(_ANSWER)
        except TemplateRefuses:
            return None
        return behind if answer else None

    def _render(
        self,
        messages: list[dict[str, Any]],
        place: str,
        tools: Sequence[Mapping[str, Any]] | None,
        prompts: bool,
        marks: bool,
    ) -> tuple[str, list[Span]]:
        from jinja2.exceptions import TemplateSyntaxError

        try:
            from nxdt_core.data.chat.template_environment import compiled  # imports transformers

            variables = {
                **_plain(self._variables),
                "messages": [_with_reasoning(message) for message in messages],
                "tools": _plain(tools),
                "documents": None,
                "add_generation_prompt": prompts,
            }
            environment, template = compiled(self._source, _MOST_CHARACTERS)
            return environment.render(template, variables, marks=marks, seconds=_MOST_SECONDS)
        except TemplateSyntaxError as error:
            reason = f"line {error.lineno}: {error.message}"
            raise TemplateUnreadable(origin=self.template.origin, reason=reason) from error
        except ImportError as error:
            origin = f"The chat template ({self.template.origin})"
            raise DataLibraryMissing(
                path=origin, package="transformers", extra="huggingface", reason=str(error)
            ) from error
        except Exception as error:  # a template is a program, which can fail in every way that Python can
            reason = str(error).rstrip(".") or type(error).__name__
            raise TemplateRefuses(place=place, origin=self.template.origin, reason=reason) from error


def _plain(value: object) -> Any:
    """Return ``value`` as JSON types: an object of another type could have methods that the sandbox does not know."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return ``message`` with its reasoning under both keys that templates read, as transformers gives it."""
    thoughts = [message[key] for key in REASONING if message.get(key) is not None]
    return {"thinking": thoughts[0], **message, "reasoning_content": thoughts[0]} if thoughts else message


def runner_of(keys: ChatKeys, tokenizer: Tokenizer) -> TemplateRunner | None:
    """Runs the template that the configuration names, else the tokenizer's; None where there is none.

    Raises:
        TemplateUnknown, DataFileNotFound, DataFileUnreadable, TextNotUtf8: of what is named.
        TemplateNeedsToken: it writes a token that the tokenizer does not name.
    """
    template = named_template(keys, tokenizer)
    if template is None and (text := tokenizer.chat_template()) is not None:
        template = ChatTemplate(text, "of the tokenizer")
    if template is None:
        return None
    special_tokens = tokenizer.special_tokens()
    for name in ("eos_token", "bos_token"):  # Jinja would write nothing
        if re.search(rf"\b{name}\b", template.text) and name not in special_tokens:
            raise TemplateNeedsToken(origin=template.origin, name=name)
    return TemplateRunner(template, special_tokens, keys.template_options, date.fromisoformat(keys.template_date))


def prompt_ids(
    messages: Messages,
    tokenizer: Tokenizer,
    keys: ChatKeys,
    *,
    place: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Return the tokens of ``messages`` and of the beginning of the assistant's answer, as in training by ``keys``.

    Raises:
        ChatTemplateMissing: there is no template.
        NxdtError: as of :func:`runner_of` and :meth:`TemplateRunner.run`.
    """
    runner = runner_of(keys, tokenizer)
    if runner is None:
        raise ChatTemplateMissing(place=place)
    text, _ = runner.run(messages, place=place, prompts=True, tools=tools)
    ids: list[int] = tokenizer.locate([text])[0].ids.tolist()
    return ids


def stop_ids(keys: ChatKeys, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end what a model writes: the tokenizer's end of text and, where it is another one, what
    ends the assistant's turn by the chat template. A template that cannot be read or run here adds none."""
    end = None
    with suppress(NxdtError):
        runner = runner_of(keys, tokenizer)
        end = None if runner is None else end_of_turn(runner, tokenizer)
    return tuple(dict.fromkeys(id_ for id_ in (tokenizer.eos_id, end) if id_ is not None))


def end_of_turn(runner: TemplateRunner, tokenizer: Tokenizer) -> int | None:
    """Return the token that follows an answer, ignoring space; None where a text follows, or it cannot be seen.

    Raises:
        TemplateNeedsToken: what follows looks like a special token, is several tokens, and none comes later.
    """
    behind, reserved = (runner._after_answer or "").lstrip(), tokenizer.reserved_tokens()
    looks = _TOKEN.match(behind)
    token = max(filter(behind.startswith, reserved), key=len, default=looks and looks[0])
    if token is None:
        return None
    ids = tokenizer.locate([token])[0].ids
    if len(ids) > 1 and token not in reserved:
        later = [candidate for candidate in reserved if candidate in behind]
        if not later:
            raise TemplateNeedsToken(origin=runner.template.origin, name=token)
        ids = tokenizer.locate([min(later, key=behind.index)])[0].ids
    return int(ids[0])


class ReservedTokens:
    """The special tokens that no message may spell: it would end a turn, or begin one.

    Args:
        tokenizer: whose tokens they are.
        allowed: whether texts may spell them all the same.
    """

    def __init__(self, tokenizer: Tokenizer, *, allowed: bool) -> None:
        reserved = () if allowed else tokenizer.reserved_tokens()
        self._pattern = re.compile("|".join(map(re.escape, reserved))) if reserved else None

    def check(self, said: Iterable[object], place: str, *, tools: object = None) -> None:
        """Check the messages of a conversation: texts, or mappings and lists with texts in them.

        Raises:
            SpecialTokenInText: a message contains such a token, or a function that may be called does; names it.
        """
        if self._pattern is None:
            return
        for number, what in enumerate((tools, *said)):
            for text in _texts(what):
                if match := self._pattern.search(text):
                    raise SpecialTokenInText(place=place, number=number, token=match[0])


def _texts(what: object) -> Iterator[str]:
    if isinstance(what, str):
        yield what
    elif isinstance(what, Mapping):
        for key, value in what.items():
            yield from _texts(key)
            yield from _texts(value)
    elif isinstance(what, Sequence):
        for value in what:
            yield from _texts(value)
