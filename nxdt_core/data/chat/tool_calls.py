"""Calls of functions in a record, and the functions that may be called. Messages are read in ``chat_records``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nxdt_core.data.files.paths import half_character
from nxdt_core.data.files.records import Place
from nxdt_core.data.files.unused_fields import is_given
from nxdt_core.errors.chats import BadMessage

__all__ = ["parsed", "read_calls", "read_tools", "tools_key", "unread_of_calls"]

_OF_CALL = frozenset({"id", "type", "index", "function", "name", "arguments"})
"""Keys that are read. ``id`` and ``index`` say which call a result is of, and so does the order of the messages."""


def read_tools(record: Mapping[str, Any], place: Place) -> Sequence[Mapping[str, Any]] | None:
    """Return the functions that may be called: ``tools``, a list or its JSON, or OpenAI's older ``functions``.

    Raises:
        BadMessage: they are something else.
    """
    key = tools_key(record)
    tools = parsed(record[key], place, 0, repr(key)) if is_given(record.get(key)) else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadMessage(place=str(place), number=0, reason=f"{key!r} must be a list of JSON schemas")
    return tools if key == "tools" else [{"type": "function", "function": tool} for tool in tools]


def tools_key(record: Mapping[str, Any]) -> str:
    """Return the key under which a record has its functions."""
    return "functions" if is_given(record.get("functions")) and not is_given(record.get("tools")) else "tools"


def read_calls(value: Any, place: Place, number: int) -> list[dict[str, Any]]:
    """Return the calls of message ``number``, each with its arguments as an object, which is how templates expect them.

    Raises:
        BadMessage: a call has no function, or its arguments are not an object.
    """
    return [_call(call, place, number) for call in _listed(value, place, number)]


def unread_of_calls(value: Any) -> Iterator[str]:
    """Yield the keys of calls that :func:`read_calls` accepts and does not read."""
    for call in [value] if isinstance(value, dict) else value:
        for source in (call, call.get("function", call)):
            yield from (key for key, each in source.items() if key not in _OF_CALL and is_given(each))


def _call(call: Any, place: Place, number: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadMessage(place=str(place), number=number, reason="a tool call has no function with a name")
    arguments = function.get("arguments")
    arguments = {} if arguments is None else parsed(arguments, place, number, f"arguments of {function['name']}")
    if not isinstance(arguments, dict):
        raise BadMessage(place=str(place), number=number, reason=f"arguments of {function['name']} are not an object")
    named = {key: value for key, value in call.items() if key == "id" and value is not None}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _listed(value: Any, place: Place, number: int) -> Sequence[Any]:
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        raise BadMessage(place=str(place), number=number, reason="its tool calls are not a list")
    return value


def parsed(value: Any, place: Place, number: int, what: str) -> Any:
    """Return ``value``, or what its JSON says where it is a text; ``what`` names it in errors.

    Raises:
        BadMessage: the text is invalid JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadMessage(place=str(place), number=number, reason=f"{what}: no JSON: {error}") from error
    if half := half_character(value, found):
        raise BadMessage(place=str(place), number=number, reason=f"{what}: half a character, {half}")
    return found
