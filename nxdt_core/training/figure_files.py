"""The files of figures in a run's directory (``metrics.jsonl`` and its like): one row per step that counts.

A run that resumes repeats the steps that a crash lost, and one that starts afresh in a directory that was used repeats
all of them. Rows of steps that are about to be repeated move to a file of their own: none is lost, and whoever reads
the figures meets each step once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TextIO

__all__ = ["set_later_rows_aside"]

_ASIDE = ".replaced.jsonl"


def set_later_rows_aside(run_dir: Path, step: int) -> None:
    """Move rows of steps after ``step``, and a last row that a crash cut short, to ``<name>.replaced.jsonl``.

    Files whose rows have no ``step`` are left as they are.

    Args:
        run_dir: directory of the ``.jsonl`` files.
        step: the last one that is not repeated; 0 for a run that starts afresh.
    """
    for path in sorted(run_dir.glob("*.jsonl")):
        if not path.name.endswith(_ASIDE) and _has_steps(path):
            _split(path, step)


def _has_steps(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        return _step(file.readline()) is not None


def _split(path: Path, step: int) -> None:
    kept_path = path.with_name(f".{path.name}.kept")
    moved = 0
    with (
        path.open(encoding="utf-8", errors="replace", newline="\n") as rows,
        kept_path.open("w", encoding="utf-8", newline="\n") as kept,
        _Aside(path.with_name(path.name.removesuffix(".jsonl") + _ASIDE)) as aside,
    ):
        for row in rows:
            found = _step(row)
            if found is not None and found <= step:
                kept.write(row)
            else:
                aside.write(row.rstrip("\n") + "\n")
                moved += 1
        kept.flush()
        os.fsync(kept.fileno())
    if moved:
        kept_path.replace(path)
    else:
        kept_path.unlink()


class _Aside:
    """A file that is made with its first row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def __enter__(self) -> _Aside:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def write(self, row: str) -> None:
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8", newline="\n")
        self._file.write(row)


def _step(row: str) -> int | None:
    """The step of a whole row; None where there is none."""
    if not row.endswith("\n"):
        return None
    try:
        found = json.loads(row)
    except ValueError:
        return None
    step = found.get("step") if isinstance(found, dict) else None
    return step if type(step) is int else None
