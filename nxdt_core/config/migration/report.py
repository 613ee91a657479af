"""The report of a migration: each key of the file, what became of it, and why."""

from __future__ import annotations

from typing import Any

from nxdt_core.config.migration.programs import summary
from nxdt_core.protocols.migration import MigratedConfig, MigratedKey, Verdict

__all__ = ["report_json", "report_markdown"]

_MEANINGS: dict[Verdict, str] = {
    "mapped": "kept under its name",
    "renamed": "kept under another name",
    "changed": "kept with another value",
    "added": "not in the file; written since leaving it out would mean something else here",
    "unneeded": "left out; nothing is lost without it",
    "off": "left out; it is unset, switched off, or says what holds here anyway",
    "ignored": "left out; the framework that the file is of did not read it",
    "unsupported": "left out; it asks for something that is not done here",
}


def report_markdown(migration: MigratedConfig) -> str:
    """Return the report as a page."""
    lines = [f"# {migration.source} → {migration.target}", "", f"A file of {migration.program}.", ""]
    lines += ["| verdict | keys | meaning |", "|---|---|---|"]
    lines += [f"| {verdict} | {count} | {_MEANINGS[verdict]} |" for verdict, count in summary(migration)]
    lines += ["", "## Still to be set", "", *_list(migration.to_set)]
    lines += ["", "## What `nxdt config check` says of it now", "", *_list(migration.remaining)]
    lines += ["", "## Every key", "", "| line | key | value | verdict | now | why |", "|---|---|---|---|---|---|"]
    lines += [_row(row) for row in migration.keys]
    return "\n".join(lines) + "\n"


def report_json(migration: MigratedConfig) -> dict[str, Any]:
    """Return the report of a migration as values of JSON."""
    return {
        "source": str(migration.source),
        "target": str(migration.target),
        "framework": migration.program,
        "keys": [
            {
                "key": row.key,
                "line": row.line or None,
                "verdict": row.verdict,
                "target": row.target or None,
                "value": row.value,
                "reason": row.reason or None,
            }
            for row in migration.keys
        ],
        "to_set": [{"key": key, "reason": reason} for key, reason in migration.to_set],
        "remaining": [{"key": key, "problem": problem} for key, problem in migration.remaining],
    }


def _list(entries: tuple[tuple[str, str], ...]) -> list[str]:
    return [f"- `{key}`: {text}" for key, text in entries] or ["Nothing."]


def _row(row: MigratedKey) -> str:
    cells = (
        str(row.line or ""),
        f"`{row.key}`",
        f"`{row.value}`" if row.value else "",
        row.verdict,
        f"`{row.target}`" if row.target else "",
        row.reason,
    )
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
