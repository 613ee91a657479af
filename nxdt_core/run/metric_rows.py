"""Rows of the metric files in a run's directory (``metrics.jsonl`` and its like), as reports and plots read them.

A crash or another program may have written any line: it gives a row or nothing, never an error. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nxdt_core.system.regular_files import regular_opener

Row = dict[str, Any]

_LONGEST_LINE_BYTES = 64 * 2**20
_LARGEST, _SMALLEST = 1e100, 1e-100
_SAFE_DIGITS = 18
_MOST_ROWS = 2**15
"""Rows of a file that are kept whole, about 2 KB each; more are thinned."""
_DECODER = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) <= _SAFE_DIGITS else float(digits))


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

    After a resume, the last row of a step counts. Rows that a crash truncated are left out. Of many rows, those stay
    that have the smallest or the largest value of a column in a stretch of steps, and the first and the last.
    """
    by_step: dict[int, Row] = {}
    most = _MOST_ROWS
    for line in lines:
        row = json_object(line)
        step = row.get("step")
        if type(step) is int:
            by_step[step] = row
            if len(by_step) > most:
                by_step = _thinned(by_step)
                most = max(_MOST_ROWS, 2 * len(by_step))
    return [by_step[step] for step in sorted(by_step)]


def numbers_of(row: Row) -> Iterator[tuple[str, str, float]]:
    """Yield column, suffix and value of the finite numbers of a row; the suffix of a validation set is ``/NAME``."""
    sets = row.get("sets")
    parts = {"": row}
    if isinstance(sets, dict):
        parts |= {f"/{name}": part for name, part in sets.items() if isinstance(part, dict)}
    for suffix, part in parts.items():
        for column, value in part.items():
            if (type(value) is float or type(value) is int) and math.isfinite(value):
                yield column, suffix, value


def _thinned(rows: Mapping[int, Row]) -> dict[int, Row]:
    """Return the rows with the extremes of each column in stretches of steps, as many as leave about half of
    ``_MOST_ROWS``."""
    first, last = min(rows), max(rows)
    stretches = max(1, _MOST_ROWS // 4 // len({column for row in rows.values() for column in row}))
    extremes: dict[int, dict[str, tuple[float, int, float, int]]] = {}
    for step, row in rows.items():
        seen = extremes.setdefault((step - first) * stretches // (last - first + 1), {})
        for column, suffix, number in numbers_of(row):
            name = column + suffix
            extreme = seen.get(name)
            if extreme is None:
                seen[name] = number, step, number, step
            elif number < extreme[0]:
                seen[name] = number, step, *extreme[2:]
            elif number > extreme[2]:
                seen[name] = *extreme[:2], number, step
    steps = {first, last}
    for seen in extremes.values():
        steps.update(step for _, at_least, _, at_greatest in seen.values() for step in (at_least, at_greatest))
    return {step: rows[step] for step in steps}


def json_object(text: str) -> Row:
    """Return the JSON object in a text; an empty one where there is none.

    Integers are small enough for arithmetic and for ``str``: those of more than 18 digits become floats.
    """
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def finite(value: object) -> float | None:
    """Return a finite number as a float; None for everything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None  # type: ignore[arg-type]


def fits_axes(value: float) -> bool:
    """Return whether axes can hold the value, and the differences and powers that they compute from it."""
    return value == 0 or _SMALLEST <= abs(value) <= _LARGEST
