"""Conversations → text, and where in it the messages lie that the loss is on.

The renderer is that of transformers: Jinja in a sandbox, with generation blocks. Where a template has such blocks
they say what the assistant writes. Where it has none, a message lies between the rendering of what precedes it, with
the prompt to generate, and the rendering up to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from nxdt_plugin_sft_chat.conversation import Conversation, Message
from nxdt_plugin_sft_chat.errors import EndOfTurnUnmarked, TemplateRefuses, TemplateUnreadable, TurnsInseparable
from nxdt_plugin_sft_chat.templates import ChatTemplate

__all__ = ["Rendered", "Renderer", "Span"]

Span = tuple[int, int]
"""First character, and the one behind the last."""

_CHECKED = 32
"""Conversations in which generation blocks are compared with prefixes: they tell of the template, not of the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The text of a conversation."""

    text: str
    trained: Mapping[int, Span]
    """Number of a message, from 0 → the characters that the loss is on."""


class Renderer:
    """Renders conversations with one template.

    Args:
        template: the template.
        special_tokens: as it may call them (``eos_token``, …).
        options: what else it is told.
        day: what it is told of today.
    """

    def __init__(
        self, template: ChatTemplate, special_tokens: Mapping[str, str], options: Mapping[str, Any], day: date
    ) -> None:
        self._template = template
        self._source = template.on(day)
        self._told = {**special_tokens, **options}
        self._to_check = _CHECKED

    def render(self, conversation: Conversation, trained: Sequence[int]) -> Rendered:
        """Render ``conversation`` and find the messages ``trained`` in it.

        Raises:
            TemplateUnreadable: the template is none.
            TemplateRefuses: it raises an exception for these messages.
            TurnsInseparable: where a message lies cannot be told.
            EndOfTurnUnmarked: generation blocks end before the turn does.
        """
        messages = conversation.messages
        if not self._template.marks_generation:
            text, _ = self._run(conversation, len(messages))
            return Rendered(text=text, trained={i: self._between_prefixes(conversation, i, text) for i in trained})
        text, blocks = self._run(conversation, len(messages), marks=True)
        spoken = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if len(blocks) != len(spoken):
            reason = f"it has {len(blocks)} generation blocks for {len(spoken)} turns of the assistant"
            raise self._inseparable(conversation, spoken[0] if spoken else 0, reason)
        marked = dict(zip(spoken, blocks, strict=True))
        if self._to_check:
            self._to_check -= 1
            self._check_ends(conversation, marked, text)
        found = {i: marked[i] if i in marked else self._between_prefixes(conversation, i, text) for i in trained}
        return Rendered(text=text, trained=found)

    def _run(
        self, conversation: Conversation, count: int, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """The first ``count`` messages, and generation blocks where ``marks`` asks for them."""
        from jinja2.exceptions import TemplateError, TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = [message.for_template() for message in conversation.messages[:count]]
        tools = None if conversation.tools is None else [*conversation.tools]
        try:
            texts, blocks = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self._source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **self._told,
            )
        except TemplateSyntaxError as error:
            reason = f"line {error.lineno}: {error.message}"
            raise TemplateUnreadable(origin=self._template.origin, reason=reason) from error
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise TemplateRefuses(place=str(conversation.place), origin=self._template.origin, reason=reason) from error
        return texts[0], list(blocks[0]) if marks else []

    def _between_prefixes(self, conversation: Conversation, number: int, text: str) -> Span:
        message = conversation.messages[number]
        start = self._start(conversation, number, text)
        through, _ = self._run(conversation, number + 1)
        end = len(through) if text.startswith(through) else self._end_as_in(through, start, message, text)
        if end is None or end <= start:
            raise self._inseparable(conversation, number, "it renders earlier turns otherwise once later ones follow")
        if message.role != "assistant":  # what opens such a turn is no prompt, but nobody's words either
            start = max(start, text.find(message.content.strip(), start, end))
        return start, _without_trailing_space(text, start, end, message)

    def _start(self, conversation: Conversation, number: int, text: str) -> int:
        """Length of what precedes a message, its prompt included as far as the text goes along with it."""
        spoken = conversation.messages[number].role == "assistant"
        before, _ = self._run(conversation, number, prompt=spoken) if number or spoken else ("", [])
        if text.startswith(before):
            return len(before)
        shared = _shared(before, text)
        bare, _ = self._run(conversation, number)
        if not text.startswith(bare) or shared < len(bare):
            raise self._inseparable(conversation, number, "what precedes it is rendered otherwise once it follows")
        return shared

    def _end_as_in(self, through: str, start: int, message: Message, text: str) -> int | None:
        """Where a turn ends whose rendering changes with what follows (some templates drop older reasoning): behind
        its content and what stands behind that where it is the last turn. None where the text has neither."""
        content = message.content.strip()
        if not content or not text.startswith(content, start):
            return None
        closing = through[through.rindex(content) + len(content) :] if content in through else ""
        end = start + len(content)
        return end + len(closing) if closing and text.startswith(closing, end) else None

    def _check_ends(self, conversation: Conversation, marked: Mapping[int, Span], text: str) -> None:
        for number, (_, end) in marked.items():
            try:
                wanted = self._between_prefixes(conversation, number, text)[1]
            except (TurnsInseparable, TemplateRefuses):
                continue
            if end < wanted:
                raise EndOfTurnUnmarked(origin=self._template.origin, left_out=text[end:wanted])

    def _inseparable(self, conversation: Conversation, number: int, reason: str) -> TurnsInseparable:
        return TurnsInseparable(
            place=str(conversation.place), number=number + 1, origin=self._template.origin, reason=reason
        )


def _without_trailing_space(text: str, start: int, end: int, message: Message) -> int:
    """The end of a turn without the space behind what closes it, which nobody generates; space that itself closes the
    turn stays."""
    kept = start + len(text[start:end].rstrip())
    content = message.content.rstrip()
    return end if content and text.endswith(content, start, kept) else kept


def _shared(first: str, second: str) -> int:
    """How many characters two texts begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))
