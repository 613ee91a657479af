"""``results.json`` and the Markdown table made of it. Standard library only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Record", "Results", "read_rows", "table"]

Row = Mapping[str, Any]
Record = dict[str, Any]


class Results:
    """The records of a folder, one per stage; each change is on the disk before the call returns.

    Args:
        folder: of ``results.json`` and ``results.md``; may hold records of earlier calls.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._json, self._markdown = folder / "results.json", folder / "results.md"
        self.records: dict[str, Record] = {}
        if self._json.exists():
            self.records = json.loads(self._json.read_text(encoding="utf-8"))

    def put(self, name: str, record: Record) -> None:
        """Replace the record of one stage."""
        self.records[name] = record
        _replace(self._json, json.dumps(self.records, indent=1))
        _replace(self._markdown, table(self.records))


def read_rows(path: Path) -> list[Record]:
    """Return the rows that a stage has written; a line that a kill left unfinished is left out."""
    rows: list[Record] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def table(records: Mapping[str, Record]) -> str:
    """Return all records as Markdown: one table per stage, with its error where it has one."""
    parts = ["# Accelerator day\n"]
    for name, record in records.items():
        parts.append(f"## {name}: {record['outcome']}, {record.get('seconds', 0):.0f} s\n")
        rows = record.get("rows", [])
        if rows:
            parts.append(_rows(rows))
        if record.get("error"):
            parts.append(f"```text\n{record['error']}\n```\n\nFull log: `{record['log']}`\n")
    return "\n".join(parts)


def _rows(rows: Sequence[Row]) -> str:
    """Return one table, and a further one from each row that shares no column with those before it."""
    columns: dict[str, None] = {}
    for index, row in enumerate(rows):
        if index and row.keys() & columns.keys() <= {"what"} and len(row) > 1:
            return f"{_one_table(rows[:index], [*columns])}\n{_rows(rows[index:])}"
        columns |= dict.fromkeys(row)
    return _one_table(rows, [*columns])


def _one_table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    lines = [columns, ["---"] * len(columns), *([_cell(key, row.get(key)) for key in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        if key.startswith(("mfu", "share")):
            return f"{value:.1%}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value).replace("|", "\\|")


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
