"""How long the result of an operation of a chat template would be: rough estimates, before it runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jinja2.utils import Namespace

__all__ = ["FILTERS", "METHODS", "digits_of", "length_of", "nothing", "numbers_in", "printed", "size_of"]

_ITEM = 8
"""Bytes of a list's item, where a character counts as one."""
_PIECE = 60
"""Bytes of a short text that is split off."""
_NUMBER = re.compile(r"\d+")


def digits_of(value: int) -> int:
    """Return the number of decimal digits, or one more."""
    return value.bit_length() * 3 // 10 + 1


def length_of(value: Any) -> int:
    """Return the bytes of one more copy of a text or list, roughly."""
    return len(value) if isinstance(value, (str, bytes)) else _ITEM * len(value) if hasattr(value, "__len__") else 0


def size_of(value: Any, known: dict[int, int] | None = None) -> int:
    """Return the characters of ``str(value)``, roughly. A part that it contains twice counts twice."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Namespace):
        value = value._Namespace__attrs  # its text has them
    if not isinstance(value, Collection):
        return digits_of(value) if isinstance(value, int) else 1
    known = {} if known is None else known
    if id(value) not in known:
        parts = [part for pair in value.items() for part in pair] if isinstance(value, Mapping) else value
        known[id(value)] = 2 * len(parts) + sum(size_of(part, known) for part in parts)
    return known[id(value)]


def numbers_in(text: str) -> int:
    """Return the sum of the widths and precisions in a format, and its length."""
    return len(text) + sum(int(number[:18]) for number in _NUMBER.findall(text))


def printed(text: str | bytes, values: Any) -> int:
    """Return the characters of ``text % values`` at most: values may be widths, and those of a mapping be repeated."""
    form = text.decode("latin-1") if isinstance(text, bytes) else text
    items = list(values.values()) if isinstance(values, Mapping) else values if isinstance(values, tuple) else [values]
    widths = sum(abs(each) for each in items if isinstance(each, int)) if "*" in form else 0
    largest = max((size_of(each) for each in items), default=0)
    return numbers_in(form) + widths + form.count("%") * largest


def nothing(*args: Any, **kwargs: Any) -> int:
    """Return 0: a filter whose result is not much longer than its value."""
    return 0


def _replaced(text: Any, old: Any = "", new: Any = "", count: Any = None) -> int:
    found = len(text) + 1 if isinstance(text, bytes) else str(text).count(str(old))
    return len(text) + found * size_of(new)


def _padded(text: Any, width: Any = 80, *rest: Any, **more: Any) -> int:
    return abs(width) if isinstance(width, int) else 0


def _strung(separator: Any, values: Any = ()) -> int:
    return size_of(values) + len(separator) * (len(values) if hasattr(values, "__len__") else 0)


def _split(text: Any, sep: Any = None, *rest: Any, **more: Any) -> int:
    if not isinstance(text, str):
        return _PIECE * len(text)
    separators = [sep] if isinstance(sep, str) and sep else [*" \t\n"]
    found = sum(text.count(each) for each in separators)
    return _PIECE * (found + 1)


def _translated(text: Any, table: Any = ()) -> int:
    return len(text) * max((size_of(each) for each in table.values()), default=1) if isinstance(table, Mapping) else 0


METHODS: Mapping[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), _padded),
    **dict.fromkeys(("split", "rsplit", "splitlines"), _split),
    "expandtabs": lambda text, tabsize=8: text.count("\t") * abs(tabsize) if isinstance(text, str) else abs(tabsize),
    "join": _strung,
    "replace": _replaced,
    "translate": _translated,
}
"""Method of a text, of bytes or of an integer → estimate of its result, from the same arguments."""


def _indented(text: Any, width: Any = 4, *rest: Any, **more: Any) -> int:
    step = width if isinstance(width, int) else len(width)
    return size_of(text) + step * (str(text).count("\n") + 1)


FILTERS: Mapping[str, Callable[..., int]] = {
    "batch": lambda value, linecount, fill_with=None: _ITEM * linecount,
    "center": _padded,
    "format": lambda text, *args, **kwargs: printed(str(text), kwargs or args),
    "indent": _indented,
    "join": lambda value, d="", attribute=None: _strung(d, value),
    "list": length_of,
    "replace": _replaced,
    "slice": lambda value, slices, fill_with=None: _ITEM * slices,
    "string": size_of,
    "sum": lambda iterable, attribute=None, start=0: 0 if isinstance(start, (int, float)) else size_of(iterable),
    "tojson": lambda value, *args, indent=None, **kwargs: size_of(value) * (1 + _padded("", indent)),
}
"""Filter → estimate of its result, from the same arguments."""
