"""A conversation as every format of records gives it: the order of its messages, and what a template ignores of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from nxdt_core.data.files.records import Place, has_value
from nxdt_core.errors.chats import BadMessage, EmptyTurn, RolesOutOfOrder, TemplateRefuses

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that may speak."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that may hold its reasoning; templates read the first two."""

_MAY_FOLLOW: Mapping[str, tuple[str, ...]] = {
    "": ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "assistant with tool calls": ("tool",),
    "tool": ("tool", "assistant"),
}
"""Role, or none at the beginning → the roles that may come next."""
_LINKS = frozenset({"tool_calls", "tool_call_id"})
"""Calls are looked for by :meth:`Message.is_contained_in`; the ids link what the order of messages links too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation: the role of its speaker and its content."""

    role: str
    content: str
    """Empty where a turn has tool calls only."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields that a template may read: ``tool_calls``, ``name``, ``tool_call_id``, ``reasoning_content``, …"""
    train: bool | None = None
    """True puts the loss on the message, False does not; None leaves it to the configuration."""
    weight: float = 1.0
    """Weight of its tokens in the loss, above 0."""
    unread: tuple[str, ...] = field(default=(), compare=False)
    """Keys within its content and its calls that nothing reads."""

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """Return the message's tool calls, which a tool is to answer; empty where it has none."""
        return self.fields.get("tool_calls") or ()

    @property
    def thought(self) -> str:
        """Return the reasoning within its content; empty unless the assistant speaks."""
        thought = self.content.rpartition("</think>")[0] if self.role == "assistant" else ""
        return thought.rpartition("<think>")[2].strip()

    @property
    def words(self) -> str:
        """Return its content without reasoning."""
        return self.content.rpartition("</think>")[2].strip()

    def without_reasoning(self) -> Iterator[Message]:
        """Yield the message as it would be without its reasoning, with and without the space behind it; nothing where
        it has none."""
        fields = {key: value for key, value in self.fields.items() if key not in REASONING}
        if self.thought or len(fields) < len(self.fields):
            content = self.content.rpartition("</think>")[2] if self.thought else self.content
            yield from (replace(self, fields=fields, content=text) for text in (content.lstrip(), content))

    def is_contained_in(self, text: str) -> bool:
        """Return whether a rendering has its words and the functions that it calls."""
        return self.words in text and all(call["function"]["name"] in text for call in self.calls)

    def ends(self, said: str) -> bool:
        """Return whether a turn that is rendered as ``said`` ends with the words of this message.

        The token that closes a turn may end with the same characters, as with an answer of ``>``. The words then occur
        before that token too.
        """
        words = self.content.strip()
        return bool(words) and said.endswith(words) and words not in said.removesuffix(words)

    def for_template(self, nothing: str | None) -> dict[str, Any]:
        """Return the message as templates expect it; ``nothing`` is the content of a turn that only calls tools."""
        content = nothing if self.calls and not self.content else self.content
        return {"role": self.role, "content": content, **self.fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages of one record."""

    place: Place
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    """JSON schemas of the functions that the assistant may call."""
    unused: tuple[str, ...] = ()
    """Fields of the record that are not part of the conversation."""


def check_order(conversation: Conversation) -> None:
    """Let a conversation pass whose speakers take turns.

    Raises:
        RolesOutOfOrder: one speaks where another would have to.
        EmptyTurn: an assistant says nothing and calls nothing.
    """
    before = ""
    for number, message in enumerate(conversation.messages, start=1):
        if message.role not in _MAY_FOLLOW[before]:
            raise RolesOutOfOrder(
                place=str(conversation.place),
                number=number,
                role=message.role,
                before=before,
                allowed=_MAY_FOLLOW[before],
            )
        if message.role == "assistant" and not (message.content.strip() or message.calls):
            raise EmptyTurn(place=str(conversation.place), number=number)
        before = "assistant with tool calls" if message.role == "assistant" and message.calls else message.role


def merged(messages: Sequence[Message]) -> list[Message]:
    """Return ``messages`` with those of one speaker in a row joined by a blank line.

    A system or developer message behind others is the user's: a conversation has one system message, at its start.
    Calls of tools and their results stay apart.
    """
    result: list[Message] = []
    for message in messages:
        before = result[-1] if result else None
        if message.role in ("system", "developer") and before and before.role != message.role:
            message = replace(message, role="user")
        alike = before and (before.role, before.train, before.weight) == (message.role, message.train, message.weight)
        if before and alike and message.role != "tool" and not (before.calls or message.calls):
            content = "\n\n".join(text for text in (before.content, message.content) if text.strip())
            result[-1] = replace(message, content=content, fields={**before.fields, **message.fields})
        else:
            result.append(message)
    return result


def in_order_of_calls(messages: Sequence[Message], place: Place) -> list[Message]:
    """Return ``messages`` with the results of each turn's calls in the order of the calls, matched by their ids.

    Results without ids stay where they are, unless several calls have ids.

    Raises:
        BadMessage: an id is missing, unknown or repeated, or a call has no result; names the place and the message.
    """
    ordered = list(messages)
    for at, message in enumerate(messages):
        if not message.calls:
            continue
        results = list(takewhile(lambda candidate: candidate.role == "tool", messages[at + 1 :]))
        calls = [call.get("id") for call in message.calls]
        ids = [result.fields.get("tool_call_id") for result in results]
        if any(map(has_value, ids)) or (results and len(calls) > 1 and any(map(has_value, calls))):
            for index, id_ in enumerate(ids):
                if not has_value(id_) or id_ not in calls or id_ in ids[:index]:
                    reason = f"its tool_call_id {id_!r} is not that of a call before it that has no result yet"
                    raise BadMessage(place=str(place), number=at + 2 + index, reason=reason)
            for index, id_ in enumerate(calls):
                if id_ not in ids or id_ in calls[:index]:
                    reason = f"its call with the id {id_!r} has no result, or shares one"
                    raise BadMessage(place=str(place), number=at + 1, reason=reason)
            results.sort(key=lambda result: calls.index(result.fields["tool_call_id"]))
            ordered[at + 1 : at + 1 + len(results)] = results
    return ordered


def ignored_fields(conversation: Conversation, text: str, render: Callable[[Conversation], str]) -> tuple[str, ...]:
    """Return the names of the parts of ``conversation`` that ``text``, its rendering, does not depend on.

    Args:
        conversation: the record.
        text: what ``render`` makes of it.
        render: runs the template.
    """
    names: dict[str, None] = {}
    for name, other in _others(conversation, text):
        with suppress(TemplateRefuses):  # it asks for what is missing
            if render(other) == text:
                names[name] = None
    return tuple(names)


def _others(conversation: Conversation, text: str) -> Iterator[tuple[str, Conversation]]:
    """Yield the name of a part, and the conversation without it. Words that are in the text need no other rendering."""
    messages = conversation.messages
    named = (name for message in messages for name, value in message.fields.items() if has_value(value))
    for name in dict.fromkeys(named):
        if name not in _LINKS:
            fields = [{key: value for key, value in item.fields.items() if key != name} for item in messages]
            others = [replace(item, fields=rest) for item, rest in zip(messages, fields, strict=True)]
            yield f"messages.{name}", replace(conversation, messages=others)
    if any(message.thought for message in messages):
        answers = [item.content.rpartition("</think>")[2] if item.thought else item.content for item in messages]
        silent = [replace(item, content=answer) for item, answer in zip(messages, answers, strict=True)]
        yield "reasoning in content", replace(conversation, messages=silent)
    if conversation.tools:
        yield "tools", replace(conversation, tools=None)
    for number, message in enumerate(messages):
        if message.content.strip() and not message.is_contained_in(text):
            yield f"{message.role} messages", _with(conversation, number, replace(message, content="."))
        if not all(leaf in text for leaf in _leaves([call["function"]["arguments"] for call in message.calls])):
            calls = [{**call, "function": {**call["function"], "arguments": {}}} for call in message.calls]
            other = replace(message, fields={**message.fields, "tool_calls": calls})
            yield "messages.tool_calls.arguments", _with(conversation, number, other)


def _with(conversation: Conversation, number: int, message: Message) -> Conversation:
    messages = conversation.messages
    return replace(conversation, messages=[*messages[:number], message, *messages[number + 1 :]])


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts within ``value``, and the JSON of its numbers and constants."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value if isinstance(value, str) else json.dumps(value)
