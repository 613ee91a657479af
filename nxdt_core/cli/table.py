"""Plain aligned tables: readable in a terminal, and one line a row for ``grep`` where the output is no terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

import click

__all__ = ["human_size", "print_facts", "print_table", "shade"]

_GAP = "  "
_NARROWEST_LAST = 24
"""Columns that the last column keeps, however narrow the terminal."""

_SHADES = {
    "ok": "green",
    "committed": "green",
    "unfinished": "yellow",
    "blocked": "yellow",
    "shadowed": "yellow",
    "incompatible": "red",
    "broken": "red",
    "corrupt": "red",
    "damaged": "red",
}


def shade(state: str) -> str:
    """Colour a state word by how much it should worry; click drops the colour where no terminal reads it."""
    return click.style(state, fg=_SHADES.get(state))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print rows under a header. Columns that are empty in every row are left out.

    Args:
        header: column titles.
        rows: cells as text, colours included; the last one may hold several lines, and wraps at the terminal's edge.
        right: titles of the columns that are aligned to the right; not the last.
    """
    filled = [column for column in range(len(header)) if any(cells[column] for cells in rows)]
    titles = [header[column] for column in filled]
    table = [[cells[column] for column in filled] for cells in rows]
    widths = [max(map(_width, column)) for column in zip(titles, *table, strict=True)][:-1]
    hang = sum(widths) + len(_GAP) * len(widths)
    for cells in ([click.style(title, bold=True) for title in titles], *table):
        lead = [_aligned(*each) for each in zip(cells[:-1], widths, (title in right for title in titles), strict=False)]
        click.echo(_GAP.join([*lead, _wrapped(cells[-1], hang)]).rstrip())


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print ``name  value`` lines with the values aligned."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        click.echo(f"{click.style(name.ljust(width), bold=True)}{_GAP}{_wrapped(value, width + len(_GAP))}".rstrip())


def human_size(size_bytes: int) -> str:
    """Bytes in the unit that leaves one to four digits: ``1.4 MiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _width(cell: str) -> int:
    return len(click.unstyle(cell))


def _aligned(cell: str, width: int, right: bool) -> str:
    pad = " " * (width - _width(cell))
    return pad + cell if right else cell + pad


def _wrapped(text: str, hang: int) -> str:
    """Lines of the last column, each wrapped at the terminal's edge and indented under the first."""
    lines = text.split("\n")
    if sys.stdout.isatty() and click.unstyle(text) == text:
        width = max(shutil.get_terminal_size().columns - hang, _NARROWEST_LAST)
        lines = [part for line in lines for part in textwrap.wrap(line, width, break_on_hyphens=False) or [""]]
    return f"\n{' ' * hang}".join(lines)
