"""Annotations as shapes: each reads a plain value strictly, describes what it allows, and gives JSON Schema.

Strict means: no number out of text, no text out of numbers, no integer out of ``true``. An integer where a
number is wanted is the one conversion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nxdt_core.config.annotations import Range
from nxdt_core.errors.base import either

__all__ = [
    "LARGEST_INTEGER",
    "Anything",
    "Choice",
    "FilePath",
    "Hidden",
    "Items",
    "Mismatch",
    "Nothing",
    "OneOf",
    "Scalar",
    "Shape",
    "Table",
    "describe_value",
]


class Mismatch(Exception):
    """The value does not have the shape; ``found`` says what it is instead."""

    def __init__(self, found: str) -> None:
        super().__init__(found)
        self.found = found


class Shape(Protocol):
    """What a value must look like."""

    def read(self, value: Any) -> Any:
        """Return the typed value of a node.

        Raises:
            Mismatch: it does not fit.
        """
        ...

    def describe(self) -> str:
        """Return what is allowed, as the object of a sentence."""
        ...

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the values."""
        ...


LARGEST_INTEGER = 2**63 - 1
"""Integers go to torch, to C and to JSON, where they have 64 bits."""
_WORDS: dict[type, tuple[str, str]] = {
    bool: ("true or false", "boolean"),
    int: ("an integer", "integer"),
    float: ("a number", "number"),
    str: ("text", "string"),
}


@dataclass(frozen=True, slots=True)
class Scalar:
    """``bool``, ``int``, ``float`` or ``str``, within bounds."""

    type: type
    bounds: Range | None = None

    def read(self, value: Any) -> Any:
        """Return the number of this type; floats must be finite."""
        if type(value) is int and self.type is int and not -LARGEST_INTEGER - 1 <= value <= LARGEST_INTEGER:
            raise Mismatch("an integer of more than 64 bits")
        try:
            read: Any = float(value) if self.type is float and type(value) is int else value
        except OverflowError as error:  # an integer of more than 308 digits
            raise Mismatch(describe_value(value)) from error
        fits = type(read) is self.type
        fits = fits and (self.type is not float or math.isfinite(read))
        if not fits or (self.bounds is not None and not self.bounds.holds(read)):
            raise Mismatch(describe_value(value))
        return read

    def describe(self) -> str:
        """``an integer of at least 1``."""
        words = _WORDS[self.type][0]
        return f"{words} {self.bounds.describe()}".rstrip() if self.bounds else words

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON type and the bounds."""
        schema: dict[str, Any] = {"type": _WORDS[self.type][1]}
        if self.bounds is not None and self.bounds.low is not None:
            schema["minimum"] = self.bounds.low
        if self.bounds is not None and self.bounds.high is not None:
            schema["maximum"] = self.bounds.high
        return schema


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the values of a ``Literal``."""

    values: tuple[Any, ...]

    def read(self, value: Any) -> Any:
        """Return the value if it is one of the allowed ones; ``1`` and ``true`` differ."""
        if not any(type(value) is type(allowed) and value == allowed for allowed in self.values):
            raise Mismatch(describe_value(value))
        return value

    def describe(self) -> str:
        """Return the values for a message: ``'a', 'b' or 'c'``."""
        return either(self.words())

    def words(self) -> list[str]:
        """Return each value as YAML text."""
        return ["null" if value is None else repr(value) for value in self.values]

    def json_schema(self) -> dict[str, Any]:
        """Return the list of values."""
        return {"enum": list(self.values)}


@dataclass(frozen=True, slots=True)
class Nothing:
    """The value ``null``."""

    def read(self, value: Any) -> None:
        """Return None, the only allowed value."""
        if value is not None:
            raise Mismatch(describe_value(value))

    def describe(self) -> str:
        """Return ``null``."""
        return "null"

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON type null."""
        return {"type": "null"}


_NAME_BYTES = 255
"""Of a name within a path, which is what Linux accepts."""


def _is_path(text: str) -> bool:
    """Whether the operating system accepts a path; it raises an error even at the question whether others exist."""
    names = text.encode(errors="replace").split(b"/")
    return bool(text) and "\0" not in text and all(len(name) <= _NAME_BYTES for name in names)


@dataclass(frozen=True, slots=True)
class FilePath:
    """``Path`` or ``SourcePath``: a file or directory to read. The configuration makes it absolute beforehand."""

    type: type[Path] | type[str] = Path

    def read(self, value: Any) -> Path | str:
        """Return the path."""
        if not isinstance(value, (str, Path)) or not _is_path(str(value)):
            raise Mismatch(describe_value(value))
        return self.type(value)

    def describe(self) -> str:
        """Return ``a path``."""
        return "a path"

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON type string."""
        return {"type": "string", "minLength": 1}


@dataclass(frozen=True, slots=True)
class Hidden:
    """A secret of some shape."""

    shape: Shape

    def read(self, value: Any) -> Any:
        """Return the value as the inner shape reads it."""
        return self.shape.read(value)

    def describe(self) -> str:
        """Return the description of the inner shape."""
        return self.shape.describe()

    def json_schema(self) -> dict[str, Any]:
        """Return the schema of the inner shape, marked as written and never read back."""
        return {**self.shape.json_schema(), "writeOnly": True}


@dataclass(frozen=True, slots=True)
class OneOf:
    """A union; the first member that fits reads the value."""

    members: tuple[Shape, ...]

    def read(self, value: Any) -> Any:
        """Return the value of the first member that reads it; a mismatch inside a list or mapping keeps its place."""
        found = describe_value(value)
        for member in self.members:
            try:
                return member.read(value)
            except Mismatch as mismatch:
                if isinstance(member, (Items, Table)) and isinstance(value, (list, tuple, Mapping)):
                    found = mismatch.found
        raise Mismatch(found)

    def describe(self) -> str:
        """Return the descriptions of the members, joined by "or"."""
        words: list[str] = []
        for member in self.members:
            words += member.words() if isinstance(member, Choice) else [member.describe()]
        return either(list(dict.fromkeys(words)))

    def json_schema(self) -> dict[str, Any]:
        """Return ``anyOf`` of the members."""
        return {"anyOf": [member.json_schema() for member in self.members]}


@dataclass(frozen=True, slots=True)
class Items:
    """A list: of one item shape, or of one shape a place."""

    items: tuple[Shape, ...]
    fixed: bool = False
    make: Callable[[list[Any]], Any] = tuple

    def read(self, value: Any) -> Any:
        """Return the items; a mismatch names the item."""
        if not isinstance(value, (list, tuple)):
            raise Mismatch(describe_value(value))
        if self.fixed and len(value) != len(self.items):
            raise Mismatch(f"a list of {len(value)}")
        shapes = self.items if self.fixed else self.items * len(value)
        read = []
        for number, (shape, item) in enumerate(zip(shapes, value, strict=True), start=1):
            try:
                read.append(shape.read(item))
            except Mismatch as mismatch:
                raise Mismatch(f"{mismatch.found} as item {number} of the list") from None
        return self.make(read)

    def describe(self) -> str:
        """``a list, each item text``."""
        if self.fixed:
            return f"a list of {len(self.items)}: {', '.join(shape.describe() for shape in self.items)}"
        return f"a list, each item {self.items[0].describe()}"

    def json_schema(self) -> dict[str, Any]:
        """Return the type array."""
        if self.fixed:
            size = len(self.items)
            places = [shape.json_schema() for shape in self.items]
            return {"type": "array", "prefixItems": places, "minItems": size, "maxItems": size}
        return {"type": "array", "items": self.items[0].json_schema()}


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping from text to values of one shape."""

    value: Shape

    def read(self, value: Any) -> dict[str, Any]:
        """Return the entries; a mismatch names the key."""
        if not isinstance(value, Mapping):
            raise Mismatch(describe_value(value))
        read = {}
        for key, item in value.items():
            try:
                read[str(key)] = self.value.read(item)
            except Mismatch as mismatch:
                raise Mismatch(f"{mismatch.found} under {key!r}") from None
        return read

    def describe(self) -> str:
        """``a mapping to numbers``."""
        return "a mapping" if isinstance(self.value, Anything) else f"a mapping to {self.value.describe()}"

    def json_schema(self) -> dict[str, Any]:
        """Return the type object."""
        return {"type": "object", "additionalProperties": self.value.json_schema()}


@dataclass(frozen=True, slots=True)
class Anything:
    """``Any``."""

    def read(self, value: Any) -> Any:
        """Return the value itself."""
        return value

    def describe(self) -> str:
        """``any value``."""
        return "any value"

    def json_schema(self) -> dict[str, Any]:
        """No bound."""
        return {}


def describe_value(value: Any) -> str:
    """Return a description of a found value: ``'12' (text)``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, (list, tuple)) and not value:
        return "an empty list"
    text = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}…"
    if isinstance(value, (list, tuple)):
        return f"{text} (a list)"
    return f"{text} ({'text' if isinstance(value, str) else _WORDS.get(type(value), ('a value', ''))[0]})"
