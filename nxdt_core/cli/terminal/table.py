"""Plain aligned tables: readable in a terminal, and one line per row for ``grep`` where the output is not a
terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

import click

from nxdt_core.visible_text import visible

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
    "not trusted": "red",
}


def shade(state: str) -> str:
    """Colour a state word by how much it should worry; click drops the colour where no terminal reads it."""
    return click.style(state, fg=_SHADES.get(state))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print rows under a header. Columns that are empty in every row are left out.

    Args:
        header: column titles.
        rows: cells as text, colours included; the last one may hold several lines. In a terminal, the last column
            wraps at its edge, and one of the others where the last would have no room.
        right: titles of the columns that are aligned to the right; not the last.
    """
    rows = [[visible(cell, colours=True) for cell in cells] for cells in rows]
    filled = [column for column in range(len(header)) if any(cells[column] for cells in rows)]
    titles = [header[column] for column in filled]
    table = [[cells[column] for column in filled] for cells in rows]
    widths = _fitted([(title, *cells) for title, *cells in zip(titles, *table, strict=True)][:-1])
    hang = sum(widths) + len(_GAP) * len(widths)
    for cells in ([click.style(title, bold=True) for title in titles], *table):
        parts = [_lines(cell, width) for cell, width in zip(cells[:-1], widths, strict=True)]
        parts.append(_lines(cells[-1], max(_columns() - hang, _NARROWEST_LAST)))
        for line in zip_longest(*parts, fillvalue=""):
            lead = zip(line[:-1], widths, (title in right for title in titles), strict=False)
            click.echo(_GAP.join([*(_aligned(*each) for each in lead), line[-1]]).rstrip())


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print ``name  value`` lines with the values aligned."""
    facts = [(visible(name), value) for name, value in facts]
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        lines = _lines(value, max(_columns() - width - len(_GAP), _NARROWEST_LAST))
        text = f"\n{' ' * (width + len(_GAP))}".join(lines)
        click.echo(f"{click.style(name.ljust(width), bold=True)}{_GAP}{text}".rstrip())


def human_size(size_bytes: int) -> str:
    """Return the bytes in the unit that leaves one to four digits: ``1.4 MiB``."""
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


def _fitted(columns: Sequence[Sequence[str]]) -> list[int]:
    """Widths of the columns before the last: as wide as their text, but for one where the last needs room."""
    widths = [max(map(_width, cells)) for cells in columns]
    excess = sum(widths) + len(_GAP) * len(widths) + _NARROWEST_LAST - _columns()
    if widths and excess > 0:
        longest_words = [max(_width(word) for cell in cells for word in cell.split()) for cells in columns]
        gives = [width - word for width, word in zip(widths, longest_words, strict=True)]
        widths[gives.index(max(gives))] -= min(max(gives), excess)
    return widths


def _columns() -> int:
    """Columns of the terminal; no end to them where no terminal reads the table."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def _lines(text: str, width: int) -> list[str]:
    """The lines of a cell, each wrapped at ``width``; text with colours stays as it is."""
    lines = visible(text, colours=True).split("\n")
    if not sys.stdout.isatty() or click.unstyle(text) != text:
        return lines
    return [part for line in lines for part in textwrap.wrap(line, width, break_on_hyphens=False) or [""]]
