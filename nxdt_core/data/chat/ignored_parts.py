"""What a chat template ignores of a conversation: its rendering is the same without it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nxdt_core.data.chat.conversation import Conversation, Message
from nxdt_core.data.files.unused_fields import is_given
from nxdt_core.errors.chats import TemplateRefuses

__all__ = ["ignored_fields"]

_LINKS = frozenset({"tool_calls", "tool_call_id"})
"""Calls are looked for by :meth:`Message.is_contained_in`; the ids link what the order of messages links too."""


def ignored_fields(conversation: Conversation, text: str, render: Callable[[Conversation], str]) -> tuple[str, ...]:
    """Return the names of the parts of ``conversation`` that ``text``, its rendering, does not depend on.

    Args:
        conversation: the record.
        text: what ``render`` makes of it.
        render: runs the template.
    """
    found = (name for name, other in _others(conversation, text) if _is_same(text, other, render))
    return tuple(dict.fromkeys(found))


def _is_same(text: str, other: Conversation, render: Callable[[Conversation], str]) -> bool:
    try:
        return render(other) == text
    except TemplateRefuses:  # it asks for what is missing
        return False


def _others(conversation: Conversation, text: str) -> Iterator[tuple[str, Conversation]]:
    """Yield the name of a part, and the conversation without it. Words that are in the text need no other rendering."""
    messages = conversation.messages
    named = (name for message in messages for name, value in message.fields.items() if is_given(value))
    for name in dict.fromkeys(named):
        if name not in _LINKS:
            yield f"messages.{name}", replace(conversation, messages=[_without(each, name) for each in messages])
    if any(message.thought for message in messages):
        yield "reasoning in content", replace(conversation, messages=[_without_thought(each) for each in messages])
    if conversation.tools:
        yield "tools", replace(conversation, tools=None)
    for number, message in enumerate(messages):
        if message.content.strip() and not message.is_contained_in(text):
            yield f"{message.role} messages", _with(conversation, number, replace(message, content="."))
        if not all(leaf in text for leaf in _leaves([call["function"]["arguments"] for call in message.calls])):
            calls = [{**call, "function": {**call["function"], "arguments": {}}} for call in message.calls]
            other = replace(message, fields={**message.fields, "tool_calls": calls})
            yield "messages.tool_calls.arguments", _with(conversation, number, other)


def _without(message: Message, name: str) -> Message:
    return replace(message, fields={key: value for key, value in message.fields.items() if key != name})


def _without_thought(message: Message) -> Message:
    return replace(message, content=message.content.rpartition("</think>")[2]) if message.thought else message


def _with(conversation: Conversation, number: int, message: Message) -> Conversation:
    messages = conversation.messages
    return replace(conversation, messages=[*messages[:number], message, *messages[number + 1 :]])


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts within ``value``, and the JSON of its numbers and constants."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from _leaves(each)
    else:
        yield value if isinstance(value, str) else json.dumps(value)
