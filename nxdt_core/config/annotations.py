"""What an annotation of a section can say in addition to its type: bounds, secrets, paths, lengths of time.

They are written with :data:`typing.Annotated`, so that type checkers see the bare type. Components' own
sections may use them too::

    momentum: Annotated[float, Range(0.0, 1.0)] = 0.9
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

from pydantic import SecretStr

__all__ = [
    "FORMS",
    "DefaultsTo",
    "Duration",
    "Fraction",
    "NamesModel",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PartOf",
    "PositiveInt",
    "Range",
    "Secret",
    "SecretText",
    "SourcePath",
    "StartsAtFile",
    "Written",
    "seconds_of",
]


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number, both included; None means unbounded."""

    low: float | None = None
    high: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Return pydantic's schema of a number within the bounds."""
        bounds = {"ge": self.low, "le": self.high}
        return {**handler(source), **{name: bound for name, bound in bounds.items() if bound is not None}}

    def holds(self, value: float) -> bool:
        """Return whether ``value`` is within the bounds."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def describe(self) -> str:
        """Return a description of the bounds, to follow "an integer" or "a number"."""
        if self.low is not None and self.high is not None:
            return f"from {self.low:g} to {self.high:g}"
        if self.low is not None:
            return f"of at least {self.low:g}"
        return "" if self.high is None else f"of at most {self.high:g}"


@dataclass(frozen=True, slots=True)
class DefaultsTo:
    """Where the key is not set, it takes the value of ``key``; the two may differ."""

    key: str


@dataclass(frozen=True, slots=True)
class PartOf:
    """The key counts some of what ``key`` counts: all parts together are no more than that."""

    key: str


class Secret:
    """The key holds a token or a password of another type than :data:`SecretText`: a value that is not a reference such
    as ``${oc.env:NAME}`` is masked wherever a configuration is shown or written. Give the field ``repr=False``, too, so
    that the section does not print it."""

    def __get_pydantic_json_schema__(self, source: Any, handler: Any) -> Any:
        """Return the JSON Schema of a value that is written and never read back."""
        return {**handler(source), "writeOnly": True}


class StartsAtFile:
    """The key is an address to read from. A relative path starts at the directory of the file that sets it, as one of
    type ``Path`` does; ``scheme://…`` stays as it is."""

    def __get_pydantic_json_schema__(self, source: Any, handler: Any) -> Any:
        """Return the JSON Schema of a text that is a path."""
        return {**handler(source), "format": "path"}


class NamesModel:
    """The key is text that may name a model of the Hugging Face hub, ``hf:owner/name``, as every path may. The run gets
    its path, and what the run writes has its commit."""


class Written:
    """The key is a path that a run writes to, so that it need not exist before."""


SecretText = SecretStr
"""The type of a token or a password. Its value does not print itself; ``get_secret_value()`` gives it where it is used.
A configuration shows and writes the reference that gives it, or a mask."""

SourcePath = Annotated[str, StartsAtFile()]
PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
NonNegativeFloat = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]


Duration = PositiveInt | str | Mapping[str, int]
"""The type of a key that is a length of time."""

FORMS = "seconds, 'days:hours:minutes:seconds', or a mapping of days, hours, minutes and seconds, above zero"

_UNITS = ("days", "hours", "minutes", "seconds")


def seconds_of(value: Duration) -> float:
    """Return the seconds of ``1800``, ``00:00:30:00`` or ``{minutes: 30}``.

    Raises:
        ValueError: it is none of these, or not above zero.
    """
    if isinstance(value, int):
        value = {"seconds": value}
    if isinstance(value, str):
        parts = value.split(":")
        if len(parts) != len(_UNITS) or not all(part.isdecimal() for part in parts):
            raise ValueError(f"{value!r} is no time")
        value = dict(zip(_UNITS, map(int, parts), strict=True))
    if not value.keys() <= set(_UNITS):
        raise ValueError(f"{sorted(value.keys() - set(_UNITS))} are not units")
    seconds = timedelta(**value).total_seconds()
    if seconds <= 0:
        raise ValueError("it is not above zero")
    return seconds
