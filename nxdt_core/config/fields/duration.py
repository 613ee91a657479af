"""Lengths of time as configurations write them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from nxdt_core.config.annotations import PositiveInt

__all__ = ["FORMS", "Duration", "seconds_of"]

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
