"""Reads the JSON lines in a run's directory. A crash, another program or another person may have written them.

Any line gives a row or nothing, never an error. :mod:`nxdt_core.train.run.metric_files` writes them. Needs no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nxdt_core.regular_files import regular_opener

__all__ = ["Row", "drawable", "finite", "json_object", "lines_of", "rows_by_step"]

Row = dict[str, Any]

_LONGEST_LINE_BYTES = 64 * 2**20
_LARGEST, _SMALLEST = 1e100, 1e-100
_SAFE_DIGITS = 18


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a text file. Bytes that are not UTF-8 are replaced; lines of more than 64 MiB are left out.

    Raises:
        OSError: it is missing, is not a regular file, or cannot be read.
    """
    with open(path, "rb", opener=regular_opener) as file:
        whole = True
        while part := file.readline(_LONGEST_LINE_BYTES):
            ends = part.endswith(b"\n")
            if whole and (ends or len(part) < _LONGEST_LINE_BYTES):
                yield part.decode("utf-8", "replace").rstrip("\r\n")
            whole = ends


def rows_by_step(lines: Iterable[str]) -> list[Row]:
    """Return the JSON objects with a ``step``, sorted by it.

    After a resume, the last row of a step counts. Rows that a crash truncated are left out.
    """
    by_step: dict[int, Row] = {}
    for line in lines:
        row = json_object(line)
        step = row.get("step")
        if type(step) is int:
            by_step[step] = row
    return [by_step[step] for step in sorted(by_step)]


def json_object(text: str) -> Row:
    """Return the JSON object in a text; an empty one where there is none.

    Integers are small enough for arithmetic and for ``str``: those of more than 18 digits become floats.
    """
    try:
        found = json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def finite(value: object) -> float | None:
    """Return a finite number as a float; None for everything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None  # type: ignore[arg-type]


def drawable(value: float) -> bool:
    """Return whether axes can hold the value, and the differences and powers that they compute from it."""
    return value == 0 or _SMALLEST <= abs(value) <= _LARGEST


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _SAFE_DIGITS else float(digits)
