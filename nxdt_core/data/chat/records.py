"""One record of a file → a conversation with its tool calls, from the forms in which chat data are published."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nxdt_core.data.chat.conversation import ROLES, Conversation, Message, check_order, in_order_of_calls, merged
from nxdt_core.data.files.paths import lone_surrogate, parse_json
from nxdt_core.data.files.records import Place, has_value, unread
from nxdt_core.errors.chats import BadMessage, UnknownRecord, UnknownRole

_OF_CALL = frozenset({"id", "type", "index", "function", "name", "arguments"})
"""Keys that are read. ``id`` and ``index`` say which call a result is of, and so does the order of the messages."""

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Names that other formats have for roles."""
_OWN = frozenset({"role", "content", "from", "value", "train", "weight", "tool_calls", "function_call"})
_OF_PART = ("type", "text")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_LISTS = ("messages", "conversations")
"""Keys of whole conversations."""
_PAIRS = (
    (("instruction", "input"), "output"),
    (("instruction", "context"), "response"),
    (("prompt",), "completion"),
    (("prompt",), "response"),
    (("question",), "answer"),
    (("question",), "response"),
    (("query",), "response"),
)
"""Keys of what is asked, and of the answer: Alpaca and pairs of texts, Dolly, TRL, question answering, OpenOrca."""


def read_tools(record: Mapping[str, Any], place: Place) -> Sequence[Mapping[str, Any]] | None:
    """Return the functions that may be called: ``tools``, a list or its JSON, or OpenAI's older ``functions``.

    Raises:
        BadMessage: they are something else.
    """
    key = tools_key(record)
    tools = parsed(record[key], place, 0, repr(key)) if has_value(record.get(key)) else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadMessage(place=str(place), number=0, reason=f"{key!r} must be a list of JSON schemas")
    return tools if key == "tools" else [{"type": "function", "function": tool} for tool in tools]


def tools_key(record: Mapping[str, Any]) -> str:
    """Return the key under which a record has its functions."""
    return "functions" if has_value(record.get("functions")) and not has_value(record.get("tools")) else "tools"


def read_calls(value: Any, place: Place, number: int) -> list[dict[str, Any]]:
    """Return the calls of message ``number``, each with its arguments as an object, which is how templates expect them.

    Raises:
        BadMessage: a call has no function, or its arguments are not an object.
    """
    if not isinstance(value, (dict, list)):
        raise BadMessage(place=str(place), number=number, reason="its tool calls are not a list")
    calls = []
    for call in [value] if isinstance(value, dict) else value:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadMessage(place=str(place), number=number, reason="a tool call has no function with a name")
        name, arguments = function["name"], function.get("arguments")
        arguments = {} if arguments is None else parsed(arguments, place, number, f"arguments of {name}")
        if not isinstance(arguments, dict):
            raise BadMessage(place=str(place), number=number, reason=f"arguments of {name} are not an object")
        named = {} if call.get("id") is None else {"id": call["id"]}
        calls.append({**named, "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def parsed(value: Any, place: Place, number: int, what: str) -> Any:
    """Return ``value``, or what its JSON says where it is a text; ``what`` names it in errors.

    Raises:
        BadMessage: the text is invalid JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        tree = parse_json(value)
    except (ValueError, RecursionError) as error:
        raise BadMessage(place=str(place), number=number, reason=f"{what}: no JSON: {error}") from error
    if half := lone_surrogate(value, tree):
        raise BadMessage(place=str(place), number=number, reason=f"{what}: half a character, {half}")
    return tree


def read_record(record: Mapping[str, Any], place: Place, *, merge: bool = False) -> Conversation:
    """Return the conversation of a record with a list of messages, or with a question and an answer.

    Several keys of a question are joined by a blank line. ``history`` holds questions and answers that come before it.
    A ``system`` text comes first, ``tools`` are the functions that may be called. ``weight`` multiplies the weights of
    all messages.

    Args:
        record: an object of a file.
        place: of it.
        merge: join messages that are out of turn, as :func:`~nxdt_core.data.chat.conversation.merged` does.

    Raises:
        UnknownRecord: it has none of the keys.
        BadMessage, UnknownRole, RolesOutOfOrder, EmptyTurn: each names the place and the message.
    """
    check_text_only(record, place)
    read, messages = _messages(record, place)
    weight = record.get("weight")
    if weight is not None:
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
            reason = f"'weight' is {weight!r}; it must be a number of at least 0"
            raise BadMessage(place=str(place), number=0, reason=reason)
        for at, message in enumerate(messages):  # 0 leaves the record out
            train, product = message.train if weight else False, message.weight * weight or 1.0
            messages[at] = replace(message, train=train, weight=product)
    messages = with_system(in_order_of_calls(messages, place), record, place)
    conversation = Conversation(
        place=place,
        messages=merged(messages) if merge else messages,
        tools=read_tools(record, place),
        unused=unused_fields(record, [*read, "weight"], messages),
    )
    check_order(conversation)
    return conversation


def _messages(record: Mapping[str, Any], place: Place) -> tuple[tuple[str, ...], list[Message]]:
    """Return the keys that were read, and their messages."""
    if any(record.get(key) is not None for key in _LISTS):
        return read_question(record, place)
    for asked, answer in _PAIRS:
        if record.get(answer) is not None and any(record.get(key) is not None for key in asked):
            messages, reply = _asked(record, asked, place), record[answer]
            if _are_messages(reply):
                messages += _read_messages(reply, answer, place, after=len(messages))
            else:
                messages.append(_made("assistant", reply, place, len(messages) + 1))
            return (*asked, answer, "history"), messages
    raise UnknownRecord(place=str(place), keys=tuple(record))


def read_question(record: Mapping[str, Any], place: Place) -> tuple[tuple[str, ...], list[Message]]:
    """Return the keys and the messages of a record's conversation or question whose answers are elsewhere.

    Raises:
        BadMessage, UnknownRole: each names the place and the message.
    """
    for key in _LISTS:
        if record.get(key) is not None:  # Arrow tables have every column in every record
            return (key,), _read_messages(record[key], key, place)
    asked = next((asked for asked, _ in _PAIRS if any(has_value(record.get(key)) for key in asked)), ())
    return (*asked, "history"), _asked(record, asked, place) if asked else []


def check_text_only(record: Mapping[str, Any], place: Place) -> None:
    """Check that a record has no images, videos or sounds, whose places in the text would be trained on alone.

    Raises:
        BadMessage: it has some.
    """
    for key in _MEDIA:
        if has_value(record.get(key)):
            raise BadMessage(place=str(place), number=0, reason=f"it has {key!r}; only text can be trained on")


def unused_fields(record: Mapping[str, Any], read: Iterable[str], messages: Sequence[Message]) -> tuple[str, ...]:
    """Return what ``messages``, read from the keys ``read`` of a record, do not contain of it."""
    begins = bool(messages) and messages[0].role == "system"
    system = ["system"] if begins and messages[0].content.strip() == str(record.get("system")).strip() else []
    within = [name for message in messages for name in message.unread]
    return tuple(dict.fromkeys([*unread(record, [*read, *system, tools_key(record)]), *within]))


def with_system(messages: Sequence[Message], record: Mapping[str, Any], place: Place) -> list[Message]:
    """Return ``messages`` behind the text that the record has under ``system``, where they do not begin with one.

    Raises:
        BadMessage: it is not a text.
    """
    system = _text(record.get("system"), place, 0)
    if system.strip() and not (messages and messages[0].role == "system"):
        return [Message(role="system", content=system), *messages]
    return list(messages)


def _asked(record: Mapping[str, Any], asked: Sequence[str], place: Place) -> list[Message]:
    """Return the messages of a question behind those of ``history``."""
    history = _listed_in(record["history"], place, "history") if has_value(record.get("history")) else []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise BadMessage(place=str(place), number=0, reason="'history' must be a list of [question, answer] pairs")
    turns = (pair for question, answer in history for pair in (("user", question), ("assistant", answer)))
    messages = [_made(role, content, place, number) for number, (role, content) in enumerate(turns, start=1)]
    first = record.get(asked[0])
    if len(asked) == 1 and _are_messages(first):
        return [*messages, *_read_messages(first, asked[0], place, after=len(messages))]
    texts = [_text(record.get(key), place, len(messages) + 1) for key in asked]
    return [*messages, Message(role="user", content="\n\n".join(text for text in texts if text.strip()))]


def _listed_in(value: Any, place: Place, key: str) -> Any:
    """Return the list whose JSON a cell of a table has, and everything else as it is."""
    is_json = isinstance(value, str) and value.lstrip().startswith("[")
    return parsed(value, place, 0, repr(key)) if is_json else value


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and isinstance(value[0], dict)
        and bool({"role", "from"} & set(value[0]))
    )


def _read_messages(value: Any, key: str, place: Place, *, after: int = 0) -> list[Message]:
    """Return the messages of a list, or of its JSON, which is under ``key`` and behind ``after`` others.

    Raises:
        BadMessage, UnknownRole: each names the place and the message.
    """
    value = _listed_in(value, place, key)
    if not isinstance(value, list) or not value:
        raise BadMessage(place=str(place), number=0, reason=f"{key!r} must be a list of at least one message")
    for number, entry in enumerate(value, start=after + 1):
        if not isinstance(entry, dict):
            raise BadMessage(place=str(place), number=number, reason=f"it is a {type(entry).__name__}, not an object")
    return [read_message(entry, place, number) for number, entry in enumerate(value, start=after + 1)]


def read_message(entry: Mapping[str, Any], place: Place, number: int) -> Message:
    """Return the message of an object with ``role`` and ``content``, or ``from`` and ``value``, the ``number``-th of
    its record.

    Raises:
        BadMessage, UnknownRole: each names the place and the message.
    """
    keys = ("from", "value") if "role" not in entry and ("from" in entry or "value" in entry) else ("role", "content")
    role, content = (entry.get(key) for key in keys)
    if not isinstance(role, str):
        raise BadMessage(place=str(place), number=number, reason=f"it has no text under {keys[0]!r}")
    ours, speaker = (_ROLES.get(name, name) if isinstance(name, str) else name
                     for name in (entry.get("role"), entry.get("from")))  # fmt: skip
    pairs = ("role", "from", ours, speaker), ("content", "value", entry.get("content"), entry.get("value"))
    for one, other, first, second in pairs:
        if has_value(first) and has_value(second) and first != second:
            raise BadMessage(place=str(place), number=number, reason=f"{one!r} and {other!r} differ; keep one of them")
    if role == "function_call":
        if has_value(entry.get("tool_calls")):
            reason = f"{keys[1]!r} and 'tool_calls' both hold calls; keep one of them"
            raise BadMessage(place=str(place), number=number, reason=reason)
        entry, content = {**entry, "tool_calls": parsed(content, place, number, "a function call")}, ""
    return _made(_ROLES.get(role, role), content, place, number, entry)


def _made(role: str, content: Any, place: Place, number: int, entry: Mapping[str, Any] | None = None) -> Message:
    """Return a message with the other keys of its object, ``entry``."""
    entry = entry or {}
    if role not in ROLES:
        raise UnknownRole(place=str(place), number=number, role=role, known=ROLES)
    text = _text(content, place, number)
    fields = {key: value for key, value in entry.items() if key not in _OWN and value is not None}
    parts = content if isinstance(content, list) else []
    left = [f"content.{key}" for part in parts for key in unread(part, _OF_PART)]
    calls, older = entry.get("tool_calls"), entry.get("function_call")
    if calls and has_value(older):
        left.append("function_call")
    if calls := calls or older:
        fields["tool_calls"] = read_calls(calls, place, number)
        for call in [calls] if isinstance(calls, dict) else calls:
            for source in (call, call.get("function", call)):
                left += [f"tool_calls.{key}" for key in unread(source, _OF_CALL)]
    train, weight = entry.get("train"), entry.get("weight", 1.0)
    if train is not None and not isinstance(train, bool):
        raise BadMessage(place=str(place), number=number, reason=f"'train' is {train!r}; it must be true or false")
    weight = 1.0 if weight is None else weight  # OpenAI's, of which 0 leaves a message out
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= 1:
        raise BadMessage(place=str(place), number=number, reason=f"'weight' is {weight!r}; it must be from 0 to 1")
    return Message(
        role=role,
        content=text,
        fields=fields,
        unread=tuple(f"messages.{name}" for name in left),
        train=False if train is None and not weight else train,
        weight=float(weight) or 1.0,
    )


def _text(content: Any, place: Place, number: int) -> str:
    """Text, nothing, or a list of parts that are all text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = [part.get("type") for part in content]
        texts = [part.get("text") for part in content]
        if all(kind == "text" for kind in kinds) and all(isinstance(text, str) for text in texts):
            return "".join(texts)
        described = f"parts of type {', '.join(sorted({str(kind) for kind in kinds}))}"
    else:
        described = f"of type {type(content).__name__}"
    raise BadMessage(place=str(place), number=number, reason=f"its content is {described}; only text can be trained on")
