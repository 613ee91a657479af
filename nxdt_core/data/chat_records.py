"""One record of a file → a conversation, from the three forms in which chat data are published."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nxdt_core.data.conversation import ROLES, Conversation, Message, check_order
from nxdt_core.data.records import Place
from nxdt_core.errors import BadMessage, UnknownRecord, UnknownRole

__all__ = ["read_message", "read_record", "read_tools", "with_system"]

_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Speakers of ShareGPT's records → roles."""
_OWN = frozenset({"role", "content", "from", "value", "train", "weight", "tool_calls"})


def read_record(record: Mapping[str, Any], place: Place) -> Conversation:
    """The conversation of a record with ``messages``, ``conversations`` or ``input`` and ``output``.

    An ``instruction`` beside an ``output`` is what the user says, before an ``input`` that is not blank (Alpaca).
    A ``system`` text beside them comes first, ``tools`` beside them are the functions that may be called.

    Raises:
        UnknownRecord: it has none of these keys.
        BadMessage, UnknownRole, RolesOutOfOrder, EmptyTurn: each names the place and the message.
    """
    if _given(record, "messages"):
        messages = [read_message(entry, place, i) for i, entry in _entries(record["messages"], "messages", place)]
    elif _given(record, "conversations"):
        entries = _entries(record["conversations"], "conversations", place)
        messages = [_sharegpt(entry, place, i) for i, entry in entries]
    elif _given(record, "output") and (_given(record, "input") or _given(record, "instruction")):
        asked = (_text(record.get(key), place, 1) for key in ("instruction", "input"))
        question = "\n\n".join(text for text in asked if text.strip())
        pairs = (("user", question), ("assistant", record["output"]))
        messages = [_made(role, content, place, i) for i, (role, content) in enumerate(pairs, start=1)]
    else:
        raise UnknownRecord(place=str(place), keys=tuple(record))
    messages = with_system(messages, record)
    conversation = Conversation(place=place, messages=messages, tools=read_tools(record.get("tools"), place))
    check_order(conversation)
    return conversation


def with_system(messages: Sequence[Message], record: Mapping[str, Any]) -> list[Message]:
    """``messages`` behind the text that the record has under ``system``, where they do not begin with one."""
    system = record.get("system")
    if isinstance(system, str) and system.strip() and not (messages and messages[0].role == "system"):
        return [Message(role="system", content=system), *messages]
    return list(messages)


def _given(record: Mapping[str, Any], key: str) -> bool:
    """Arrow tables have every column in every record."""
    return record.get(key) is not None


def _entries(value: Any, key: str, place: Place) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if not isinstance(value, list) or not value:
        raise BadMessage(place=str(place), number=0, reason=f"'{key}' must be a list of at least one message")
    for number, entry in enumerate(value, start=1):
        if not isinstance(entry, dict):
            raise BadMessage(place=str(place), number=number, reason=f"it is a {type(entry).__name__}, not an object")
        yield number, entry


def read_message(entry: Mapping[str, Any], place: Place, number: int) -> Message:
    """The message of an object with ``role`` and ``content``, the ``number``-th of its record.

    Raises:
        BadMessage, UnknownRole: each names the place and the message.
    """
    role = entry.get("role")
    if not isinstance(role, str):
        raise BadMessage(place=str(place), number=number, reason="it has no text under 'role'")
    fields, train = _fields(entry, place, number), _trained(entry, place, number)
    return _made(role, entry.get("content"), place, number, fields, train)


def _fields(entry: Mapping[str, Any], place: Place, number: int) -> dict[str, Any]:
    fields = {key: value for key, value in entry.items() if key not in _OWN and value is not None}
    calls = entry.get("tool_calls")
    if calls:
        fields["tool_calls"] = [_call(call, place, number) for call in _listed(calls, place, number)]
    return fields


def _trained(entry: Mapping[str, Any], place: Place, number: int) -> bool | None:
    """``train``, or OpenAI's ``weight``, of which 0 says no and 1 nothing."""
    train, weight = entry.get("train"), entry.get("weight")
    if train is not None and not isinstance(train, bool):
        raise BadMessage(place=str(place), number=number, reason=f"'train' is {train!r}; it must be true or false")
    if weight is not None and weight not in (0, 1):
        raise BadMessage(place=str(place), number=number, reason=f"'weight' is {weight!r}; it must be 0 or 1")
    return False if train is None and weight == 0 else train


def _sharegpt(entry: Mapping[str, Any], place: Place, number: int) -> Message:
    if "from" not in entry and "role" in entry:
        return read_message(entry, place, number)
    speaker, value = entry.get("from"), entry.get("value")
    if not isinstance(speaker, str):
        raise BadMessage(place=str(place), number=number, reason="it has no text under 'from'")
    role = _SHAREGPT.get(speaker, speaker)
    fields, train = _fields(entry, place, number), _trained(entry, place, number)
    if speaker == "function_call":
        calls = _parsed(value, place, number, "a function call")
        fields["tool_calls"] = [_call(call, place, number) for call in _listed(calls, place, number)]
        value = ""
    return _made(role, value, place, number, fields, train)


def _made(
    role: str,
    content: Any,
    place: Place,
    number: int,
    fields: Mapping[str, Any] | None = None,
    train: bool | None = None,
) -> Message:
    if role not in ROLES:
        raise UnknownRole(place=str(place), number=number, role=role, known=ROLES)
    return Message(role=role, content=_text(content, place, number), fields=fields or {}, train=train)


def _text(content: Any, place: Place, number: int) -> str:
    """Text, nothing, or a list of parts that are all text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = {part.get("type") for part in content}
        texts = [part.get("text") for part in content]
        if kinds <= {"text"} and all(isinstance(text, str) for text in texts):
            return "".join(texts)
        found = f"parts of type {', '.join(sorted(map(str, kinds)))}"
    else:
        found = f"a {type(content).__name__}"
    raise BadMessage(place=str(place), number=number, reason=f"its content is {found}; only text can be trained on")


def _call(call: Any, place: Place, number: int) -> dict[str, Any]:
    """A tool call with its arguments as an object, which is how templates expect them."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadMessage(place=str(place), number=number, reason="a tool call has no function with a name")
    arguments = function.get("arguments")
    arguments = {} if arguments is None else _parsed(arguments, place, number, f"arguments of {function['name']}")
    if not isinstance(arguments, dict):
        raise BadMessage(place=str(place), number=number, reason=f"arguments of {function['name']} are no object")
    named = {key: value for key, value in call.items() if key == "id" and value is not None}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _listed(value: Any, place: Place, number: int) -> Sequence[Any]:
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        raise BadMessage(place=str(place), number=number, reason="its tool calls are no list")
    return value


def _parsed(value: Any, place: Place, number: int, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadMessage(place=str(place), number=number, reason=f"{what}: no JSON: {error}") from error


def read_tools(value: Any, place: Place) -> Sequence[Mapping[str, Any]] | None:
    """The functions of a record that may be called, given as a list or as its JSON.

    Raises:
        BadMessage: they are something else.
    """
    tools = _parsed(value, place, 0, "'tools'")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadMessage(place=str(place), number=0, reason="'tools' must be a list of JSON schemas")
    return tools
