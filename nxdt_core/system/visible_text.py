"""Text from files, data and models on its way to a terminal or a log: control characters become visible escapes.

A terminal obeys what it is sent: escape sequences write the clipboard, clear the screen or set the title, a carriage
return overwrites a line, and marks of direction let text read as other text. None of that is the reader's wish.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CONTROLS = (
    *range(0x20),  # C0
    *range(0x7F, 0xA0),  # DEL and C1
    0x061C,  # marks of direction: Arabic letter mark, …
    *range(0x200E, 0x2010),
    *range(0x2028, 0x202F),  # … with line and paragraph separators
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),  # surrogates, which no encoding has: bytes of a path that are not UTF-8
    0xFEFF,
)
_ESCAPES = {code: f"\\u{code:04x}" for code in _CONTROLS if chr(code) not in "\n\t"}
_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")


def from_here(text: str) -> str:
    """Return ``text`` with paths below the working directory as they are named from there."""
    here = Path.cwd()
    return text if here == here.parent else re.sub(rf"(?<![\w/.:-]){re.escape(str(here))}/", "", text)


def colours_wanted() -> bool | None:
    """Return what ``NO_COLOR`` and ``FORCE_COLOR`` choose; None where a terminal gets colours, and nothing else does.

    As https://no-color.org and https://force-color.org have it, a variable that is set to nothing is not set.
    """
    return False if os.environ.get("NO_COLOR") else True if os.environ.get("FORCE_COLOR") else None


def visible(text: str, *, colours: bool = False) -> str:
    r"""Return ``text`` with control characters, marks of direction and surrogates as ``\u001b``, the escapes of JSON.

    Line feeds and tabs stay, and so do letters of every script. ``colours`` keeps sequences that set colours and
    weight: those that this program has put in.
    """
    if not colours:
        return text.translate(_ESCAPES)
    parts = _COLOUR.split(text)
    return "".join(part if number % 2 else part.translate(_ESCAPES) for number, part in enumerate(parts))


class VisibleFormatter(logging.Formatter):
    """Formats log records, whose messages may hold what files and data say, with :func:`visible`.

    Args:
        redact: replaces what must not be written, in the message and in a traceback.
        options: of :class:`logging.Formatter`.
    """

    def __init__(self, *options: Any, redact: Callable[[str], str] = str, **more: Any) -> None:
        super().__init__(*options, **more)
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of the record, its traceback included."""
        return visible(self._redact(super().format(record)))
