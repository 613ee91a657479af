"""A section of the configuration as a pydantic model: its keys are fields, and the strings below them the reference.

Values are read in pydantic's strict JSON mode, which has YAML's types: a list gives a tuple and a text a path, but no
text gives a number. What is wrong is said in the words that all sections have: what was found, and what is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from nxdt_core.config.fields.keys import keys_of
from nxdt_core.config.sources.node import describe_value

__all__ = ["Fault", "Section", "read_section"]


class Section(BaseModel):
    """Base of sections; a third party's are the same."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,
    )

    def changed(self, **values: Any) -> Self:
        """Return the section with other values, which are not checked."""
        return self.model_copy(update=values)


@dataclass(frozen=True, slots=True)
class Fault:
    """A value that a section does not take."""

    path: tuple[str, ...]
    """Its key, below those of the sections around it."""
    found: str


def read_section(cls: type[Section], values: Mapping[str, Any]) -> tuple[Section | None, list[Fault]]:
    """Return the section, or None and what is wrong with each value. A missing key is not among them.

    Raises:
        ValueError: a validator of the section itself refuses the values.
    """
    try:
        return cls.model_validate_json(json.dumps(values, default=str), strict=True), []
    except ValidationError as error:
        return None, list(_faults(cls, error.errors(include_url=False), values))


def _faults(cls: type[Section], errors: list[ErrorDetails], values: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield one for each key; of a union pydantic reports each member, and the place that is furthest inside counts."""
    found: dict[tuple[str, ...], tuple[int, str]] = {}
    for error in errors:
        if not error["loc"]:
            raise error["ctx"]["error"]
        path, value, inside = _located(cls, error["loc"], values)
        if error["type"] == "missing" and not inside:  # reported where the keys are completed
            continue
        told = [describe_value(value)]
        if isinstance(value, list) and error["type"] in ("missing", "too_long", "too_short"):
            told.append(f"a list of {len(value)}")
        else:
            told += [f"{describe_value(item)} {where}" for item, where in _descended(value, inside)]
        found[path] = max(found.get(path, (0, "")), (len(told), told[-1]))
    yield from (Fault(path, words) for path, (_, words) in found.items())


def _located(
    cls: type[Section], loc: tuple[int | str, ...], values: Any
) -> tuple[tuple[str, ...], Any, list[int | str]]:
    """Return the key of an error, its value, and the rest of the place."""
    path: list[str] = []
    section: type | None = cls
    rest = list(loc)
    while section is not None and rest:
        name = str(rest.pop(0))
        path.append(name)
        values = values.get(name)
        key = keys_of(section).get(name)
        section = key.section if key is not None and isinstance(values, Mapping) else None
    return tuple(path), values, rest


def _descended(value: Any, parts: list[int | str]) -> Iterator[tuple[Any, str]]:
    """Yield the values inside a list or a mapping on the way to an error; members of a union are passed over."""
    for part in parts:
        if isinstance(value, list) and isinstance(part, int):
            value = value[part]
            yield value, f"as item {part + 1} of the list"
        elif isinstance(value, Mapping) and part in value:
            value = value[str(part)]
            yield value, f"under {part!r}"
