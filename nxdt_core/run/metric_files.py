"""The files of metrics in a run's directory (``metrics.jsonl`` and its like): one row per step that counts.

A run that resumes repeats the steps that a crash lost, and one that starts from step 0 in a used directory repeats
all of them. Rows of steps that are about to be repeated move to a separate file: none is lost, and a reader of
the metrics sees each step once. A crash or another program may have written any line: it gives a row or nothing, never
an error. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, final

from nxdt_core.config import ResolvedConfig
from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.checkpoints import StorageError, StoreInUse
from nxdt_core.run.files import directory_lock
from nxdt_core.run.log import strict_json
from nxdt_core.system.regular_files import read_text, regular_opener, replace_text, replacing
from nxdt_core.train.build import cannot_write

_ASIDE = ".replaced.jsonl"


@final
class MetricFiles:
    """Appends rows to the metric files of a run; a run that cannot write one of them is not worth continuing.

    Args:
        run_dir: directory of the files; None writes nothing.
        fail: called with the error when a row cannot be written. That file gets no more rows.
    """

    def __init__(self, run_dir: Path | None, fail: Callable[[NxdtError], None]) -> None:
        self._run_dir = run_dir
        self._fail = fail
        self._failed: set[str] = set()
        self._files: dict[str, TextIO] = {}

    def begin(self, step: int, name: str) -> None:
        """Set the rows of steps after ``step`` aside, and open the file ``name``.

        Raises:
            CannotWriteRunDirectory: the directory cannot be written.
        """
        if self._run_dir is None:
            return
        try:
            move_later_rows(self._run_dir, step)
            self._open(self._run_dir, name)
        except OSError as error:
            raise cannot_write(self._run_dir, error) from error

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Write a row to the file ``name``, through to the operating system."""
        if self._run_dir is None or name in self._failed:
            return
        try:
            file = self._open(self._run_dir, name)
            file.write(strict_json(row) + "\n")
            file.flush()
        except OSError as error:
            self._failed.add(name)
            self._fail(cannot_write(self._run_dir, error))

    def close(self) -> None:
        """Close all metric files."""
        for file in self._files.values():
            with suppress(OSError):  # what could not be written was reported already
                file.close()
        self._files.clear()

    def _open(self, run_dir: Path, name: str) -> TextIO:
        if name not in self._files:
            self._files[name] = open(run_dir / name, "a", encoding="utf-8", opener=regular_opener)  # noqa: SIM115
        return self._files[name]


def move_later_rows(run_dir: Path, step: int) -> None:
    """Move rows of steps after ``step``, and a last row that a crash cut short, to ``<name>.replaced.jsonl``.

    Files whose rows have no ``step`` are left as they are.

    Args:
        run_dir: directory of the ``.jsonl`` files.
        step: the last one that is not repeated; 0 for a run without a checkpoint.
    """
    for path in sorted(run_dir.glob("*.jsonl")):
        if path.name.endswith(_ASIDE):
            continue
        with open(path, encoding="utf-8", errors="replace", newline="\n", opener=regular_opener) as rows:
            if _step(rows.readline()) is None:
                continue
            rows.seek(0)
            earlier, later = list[str](), list[str]()
            for row in rows:
                done = _step(row)
                (earlier if done is not None and done <= step else later).append(row.rstrip("\n") + "\n")
        if not later:
            continue
        aside = path.with_name(path.name.removesuffix(".jsonl") + _ASIDE)
        with open(aside, "a", encoding="utf-8", newline="\n", opener=regular_opener) as file:
            file.writelines(later)
            file.flush()
            os.fsync(file.fileno())
        with replacing(path) as whole:
            whole.write("".join(earlier).encode("utf-8"))
            whole.flush()
            os.fsync(whole.fileno())


def _step(row: str) -> int | None:
    """The step of a whole row; None where there is none."""
    if not row.endswith("\n"):
        return None
    step = json_object(row).get("step")
    return step if type(step) is int else None


Row = dict[str, Any]

_LONGEST_LINE_BYTES = 64 * 2**20
_LARGEST, _SMALLEST = 1e100, 1e-100
_SAFE_DIGITS = 18
_MOST_ROWS = 2**15
"""Rows of a file that are kept whole, about 2 KB each; more are thinned."""


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
    for suffix, part in [("", row), *((f"/{name}", part) for name, part in _mapping(row.get("sets")).items())]:
        for column, value in _mapping(part).items():
            if (type(value) is float or type(value) is int) and math.isfinite(value):
                yield column, suffix, value


def _mapping(value: Any) -> Row:
    return value if isinstance(value, dict) else {}


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
            found = seen.get(name)
            if found is None:
                seen[name] = number, step, number, step
            elif number < found[0]:
                seen[name] = number, step, *found[2:]
            elif number > found[2]:
                seen[name] = *found[:2], number, step
    kept = {first, last}
    for seen in extremes.values():
        kept.update(step for _, at_least, _, at_greatest in seen.values() for step in (at_least, at_greatest))
    return {step: rows[step] for step in kept}


_DECODER = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) <= _SAFE_DIGITS else float(digits))


def json_object(text: str) -> Row:
    """Return the JSON object in a text; an empty one where there is none.

    Integers are small enough for arithmetic and for ``str``: those of more than 18 digits become floats.
    """
    try:
        found = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def finite(value: object) -> float | None:
    """Return a finite number as a float; None for everything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None  # type: ignore[arg-type]


def fits_axes(value: float) -> bool:
    """Return whether axes can hold the value, and the differences and powers that they compute from it."""
    return value == 0 or _SMALLEST <= abs(value) <= _LARGEST


_CODE = re.compile(r"\[(NXDT-[A-Z0-9]+)\]")
_LIVING = ("starting", "running")


def mark_failed(config: ResolvedConfig, text: str, *, interrupted: bool = False) -> None:
    """Mark the run as failed or interrupted in those of its files that still describe it as running.

    Files of a run directory that a living process owns stay unchanged: they are those of another run, which this one
    could not replace.

    The first rank may have ended with a different exception because another rank had died. The code in the text then
    replaces the name of that exception.

    Args:
        config: of the run. With ``use_datetime_version``, files below its directory are not found and stay unchanged.
        text: what the launcher prints about the failure; the code in it becomes the error.
        interrupted: whether a signal stopped it at once.
    """
    settings, code = config.run.exp_manager.monitoring, _CODE.search(text)
    state = "interrupted" if interrupted else "failed"
    files = {key: getattr(settings, key) for key in ("health_file", "metrics_file")}
    paths = {key: config.run_dir / Path(name).expanduser() for key, name in files.items() if name is not None}
    if not paths or (code and code[1] == StoreInUse.code):
        return
    from nxdt_core.checkpoint.ownership import is_owned

    with suppress(OSError, StorageError):
        if is_owned(directory_lock(config.run_dir)):
            return
    with suppress(OSError, ValueError, KeyError, RecursionError):
        path = paths["health_file"]
        health = json_object(read_text(path))
        has_consequence = health["state"] == "failed" and not str(health.get("error")).startswith("NXDT-")
        if health["state"] in _LIVING or (code and has_consequence):
            replace_text(path, strict_json({**health, "state": state, "error": code and code[1]}) + "\n")
    with suppress(OSError, ValueError, KeyError, RecursionError):
        path = paths["metrics_file"]
        metrics = read_text(path)
        if any(re.search(rf'^nxdt_state{{.*state="{living}"}} 1$', metrics, re.MULTILINE) for living in _LIVING):
            none = re.sub(r"^(nxdt_state{.*}) 1$", r"\1 0", metrics, flags=re.MULTILINE)
            replace_text(path, re.sub(rf'^(nxdt_state{{.*state="{state}"}}) 0$', r"\1 1", none, flags=re.MULTILINE))
