"""Log records as one JSON object per line, for programs that collect logs."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from nxdt_core.visible_text import visible

__all__ = ["VALUES", "JsonFormatter", "strict_json"]

VALUES = "nxdt_values"
"""Attribute of a record: the values that its message shows, such as a row of ``metrics.jsonl``."""
_CODE = re.compile(r"\[(NXDT-[A-Z0-9]+)\]")


class JsonFormatter(logging.Formatter):
    """Formats a log record as a JSON object, on one line.

    Args:
        rank: of this process.
        redact: replaces what must not be written, in the message and in a traceback.
    """

    def __init__(self, *, rank: int, redact: Callable[[str], str] = str) -> None:
        super().__init__()
        self._rank = rank
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of the record."""
        message = self._redact(record.getMessage())
        code = _CODE.match(message)
        trace = self.formatException(record.exc_info) if record.exc_info else None
        time = datetime.fromtimestamp(record.created, UTC)
        document = {
            "time": f"{time:%Y-%m-%dT%H:%M:%S}.{time.microsecond // 1000:03}Z",
            "level": record.levelname,
            "rank": self._rank,
            "logger": record.name,
            "message": message,
            "code": None if code is None else code[1],
            "data": getattr(record, VALUES, None),
            "trace": None if trace is None else self._redact(trace),
        }
        return visible(strict_json(document))


def strict_json(value: Any) -> str:
    """Return ``value`` as JSON, which has no NaN and no infinity: they become null."""
    return json.dumps(_finite(value), ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(below) for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(below) for below in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
