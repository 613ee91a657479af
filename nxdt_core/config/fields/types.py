"""How messages describe a value that was found, and what a key allows: the latter from pydantic's JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from nxdt_core.errors.base import either

__all__ = ["Mismatch", "described", "schema_of"]

_ALLOWED = {"boolean": "true or false", "integer": "an integer", "number": "a number", "string": "text", "null": "null"}

class Mismatch(Exception):
    """The value cannot be read; ``found`` says what it is."""

    def __init__(self, found: str) -> None:
        super().__init__(found)
        self.found = found


def schema_of(cls: Any, key: str) -> dict[str, Any]:
    """Return the JSON Schema of the values of a key, without its documentation and default."""
    schema = _whole_schema(cls)
    found: dict[str, Any] = _plain(schema["properties"][key], schema.get("$defs", {}))
    return found


@cache
def _whole_schema(cls: Any) -> dict[str, Any]:
    found: dict[str, Any] = cls.model_json_schema()
    return found


def _plain(schema: Any, defs: Mapping[str, Any]) -> Any:
    """Return a schema with definitions in place of references to them."""
    if isinstance(schema, list):
        return [_plain(each, defs) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _plain(defs[schema["$ref"].rpartition("/")[2]], defs)
    kept = {name: each for name, each in schema.items() if name not in ("title", "default", "description")}
    properties = {name: _plain(each, defs) for name, each in schema.get("properties", {}).items()}
    return {name: properties if name == "properties" else _plain(each, defs) for name, each in kept.items()}


def described(schema: Mapping[str, Any]) -> str:
    """Return what a JSON Schema allows, as the object of a sentence."""
    return either(list(dict.fromkeys(_words(schema))))


def _words(schema: Mapping[str, Any]) -> list[str]:
    """The members of a union one by one, ``null`` last and numbers from the narrowest."""
    if "properties" in schema:
        return [f"a mapping of {', '.join(schema['properties'])}"]
    if "anyOf" in schema:
        order = {"boolean": 0, "integer": 1, "number": 2, "null": 9}
        members = sorted(schema["anyOf"], key=lambda member: order.get(member.get("type"), 3))
        return [word for member in members for word in _words(member)]
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ["null" if value is None else repr(value) for value in values]
    kind = schema.get("type")
    if kind == "array" and "prefixItems" in schema:
        places = [described(place) for place in schema["prefixItems"]]
        return [f"a list of {len(places)}: {', '.join(places)}"]
    if kind == "array":
        return [f"a list, each item {described(schema.get('items', {}))}"]
    if kind == "object":
        inner = schema.get("additionalProperties")
        return [f"a mapping to {described(inner)}" if isinstance(inner, Mapping) and inner else "a mapping"]
    if schema.get("format") == "path":
        return ["a path"]
    if kind is None:
        return ["any value"]
    return [f"{_ALLOWED[kind]} {_bounds(schema)}".rstrip()]


def _bounds(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"from {low:g} to {high:g}"
    if low is not None:
        return f"of at least {low:g}"
    return "" if high is None else f"of at most {high:g}"
