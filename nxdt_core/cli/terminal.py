"""Terminal output of commands: tables, wrapped notes, errors and progress bars.

A table adapts to the width of the terminal, and has one line per row for ``grep`` elsewhere. One
that is too wide first loses columns that the caller named as optional, then wraps its widest columns between words. A
word is split only where it is wider than its column, after ``/``, ``,``, ``=``, ``.``, ``_`` or ``-`` where it has one.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TextIO

import click

from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import ConfigError
from nxdt_core.system.visible_text import visible

_GAP = "  "
_NARROWEST = 12
"""Columns that text keeps, however narrow the terminal."""
_READABLE = 32
"""Columns that the last column gets before optional ones are printed."""
_STYLED = re.compile(r"((?:\x1b\[[0-9;]*m)+)([^\x1b]*)\x1b\[0m")
"""A cell that has one style from its start to its end."""
_SPLITS = re.compile(r"[^/,=._-]*[/,=._-]*")

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
_EXPLAINED = 4
"""Codes that the last line names."""


def shade(state: str) -> str:
    """Colour a state word by how much it should worry; click drops the colour where no terminal reads it."""
    return click.style(state, fg=_SHADES.get(state))


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), optional: Sequence[str] = ()
) -> None:
    """Print rows under a header. Columns that are empty in every row are left out.

    Args:
        header: column titles.
        rows: cells as text, colours included; a cell may hold several lines.
        right: titles of the columns that are aligned to the right.
        optional: titles of the columns that a terminal may be too narrow for, the first to leave out first.
    """
    rows = [[visible(cell, colours=True) for cell in cells] for cells in rows]
    filled = [column for column in range(len(header)) if any(cells[column] for cells in rows)]
    columns = {header[column]: [cells[column] for cells in rows] for column in filled}
    for title in optional:
        if title not in columns or len(columns) < 2:
            continue
        narrowest = sum(_longest_word(*column) for column in columns.items()) + len(_GAP) * (len(columns) - 1)
        last = list(columns)[-1]
        readable = min(_READABLE, _natural(last, columns[last]))  # the last column, unless it is optional, too
        if narrowest > _columns() or (last not in optional and _fitted(columns)[-1] < readable):
            del columns[title]
    widths = _fitted(columns)
    titles = [click.style(title, bold=True) for title in columns]
    for cells in (titles, *zip(*columns.values(), strict=True)):
        parts = [wrap(cell, width) for cell, width in zip(cells, widths, strict=True)]
        for line in zip_longest(*parts, fillvalue=""):
            aligned = []
            for title, cell, width in zip(columns, line, widths, strict=True):
                pad = " " * (width - _width(cell))
                aligned.append(pad + cell if title in right else cell + pad)
            click.echo(_GAP.join(aligned).rstrip())


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print ``name  value`` lines with the values aligned."""
    facts = [(visible(name), visible(value, colours=True)) for name, value in facts]
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        lines = wrap(value, max(_columns() - width - len(_GAP), _NARROWEST))
        text = f"\n{' ' * (width + len(_GAP))}".join(lines)
        click.echo(f"{click.style(name.ljust(width), bold=True)}{_GAP}{text}".rstrip())


def wrap(text: str, width: int) -> list[str]:
    """Return the lines of ``text``, each at most ``width`` columns wide; a style that spans all of it is kept.

    Lines that mix styles stay as they are. The continuation of an indented line is indented as far.
    """
    styled = _STYLED.fullmatch(text)
    if styled:
        return [f"{styled[1]}{line}\x1b[0m" for line in wrap(styled[2], width)]
    lines: list[str] = []
    for line in text.split("\n"):
        if "\x1b" in line or _width(line) <= width:
            lines.append(line)
            continue
        indent = line[: len(line) - len(line.lstrip())]
        current = ""
        for piece in _pieces(line, max(width - len(indent), 1)):
            if current and _width(indent + current + piece.rstrip()) > width:
                lines.append(indent + current.rstrip())
                current = ""
            current += piece
        lines.append(indent + current.rstrip())
    return lines


def print_wrapped(lead: str, text: str, *, colour: str | None = None, err: bool = False) -> None:
    """Print ``lead: text``, the lead in ``colour``; on a terminal in lines that fit, those after the first indented.

    Control characters become visible. ``err`` prints to standard error.
    """
    stream = sys.stderr if err else sys.stdout
    line = visible(f"{lead}: {text}" if lead else text)
    lines = wrap(line, max(_columns_of(stream) - len(_GAP), _NARROWEST)) if stream.isatty() else [line]
    if colour:
        lines[0] = click.style(lead, fg=colour) + lines[0].removeprefix(lead)
    click.echo(f"\n{_GAP}".join(lines), err=err)


def percent(share: float, digits: int = 1) -> str:
    """Return a share as a percentage: ``95.9 %``."""
    return f"{100 * share:.{digits}f} %"


def human_size(size_bytes: int) -> str:
    """Return the bytes in the unit that leaves one to four digits: ``1.4 MiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _pieces(line: str, width: int) -> list[str]:
    """The words of a line with the spaces after them; those wider than ``width`` in parts that are not."""
    pieces: list[str] = []
    for word in re.findall(r"\S+\s*", line):
        parts = [word] if _width(word.rstrip()) <= width else _SPLITS.findall(word)
        for part in filter(None, parts):
            while _width(part.rstrip()) > width:
                count = next(n for n in range(len(part), 0, -1) if n == 1 or _width(part[:n]) <= width)
                pieces.append(part[:count])
                part = part[count:]
            pieces.append(part)
    return pieces


def _width(text: str) -> int:
    """Columns of a line on a terminal: 2 of a wide character, 0 of one that joins the character before it."""
    plain = click.unstyle(text)
    if plain.isascii():
        return len(plain)
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in plain
    )


def _natural(title: str, cells: Sequence[str]) -> int:
    return max(_width(line) for cell in (title, *cells) for line in cell.split("\n"))


def _longest_word(title: str, cells: Sequence[str]) -> int:
    """Width of the longest word, with the indentation of its line."""
    lines = [line for cell in (title, *cells) for line in click.unstyle(cell).split("\n")]
    return max(len(line) - len(line.lstrip()) + max(map(_width, line.split()), default=0) for line in lines)


def _fitted(columns: Mapping[str, Sequence[str]]) -> list[int]:
    """Return the widths that fit the terminal: the widest columns get narrower, first down to their longest words."""
    widths = [_natural(*column) for column in columns.items()]
    room = _columns() - len(_GAP) * (len(columns) - 1)
    if sum(widths) <= room:
        return widths
    words = [_longest_word(*column) for column in columns.items()]
    floors = words if sum(words) <= room else [words[0], *(min(word, _NARROWEST) for word in words[1:])]
    if sum(floors) > room:
        floors[0] = min(words[0], _NARROWEST)
    while sum(widths) > max(room, sum(floors)):
        _, widest = max((width, column) for column, width in enumerate(widths) if width > floors[column])
        widths[widest] -= 1
    return widths


def _columns() -> int:
    """Columns of the terminal; no end to them where no terminal reads the table."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def error_text(error: NxdtError) -> str:
    """Return what standard error gets of an error that ends a command."""
    problems = error.problems if isinstance(error, ConfigError) else ()
    codes = list(dict.fromkeys(problem.shown_code for problem in problems)) or [error.code]
    last = f"More: nxdt explain {' '.join(codes[:_EXPLAINED])}"
    if sys.stderr.isatty():
        lines = [*_indented_lines(error.code, "", error.what(), "")]
        for line in error.do().split("\n") if not isinstance(error, ConfigError) else ():
            lines += _indented_lines("", "", line.strip(), _GAP)
        for problem in problems:
            key = f"{problem.key}: " if problem.key else ""
            text = f"{key}{problem.what()} {problem.do()}".strip()
            lines += ["", *_indented_lines(problem.shown_code, problem.place, text, _GAP)]
        return "\n".join([*lines, *([""] if problems else []), click.style(last, dim=True)])
    from nxdt_core.config.show import hide_secrets

    code, _, rest = hide_secrets(str(error)).partition(" ")
    return f"{click.style(code, fg='red', bold=True)} {rest}\n  {last}"


def _indented_lines(code: str, place: str, text: str, indent: str) -> Iterator[str]:
    """Lines of one problem; those after the first are indented further."""
    from nxdt_core.config.show import hide_secrets

    text = visible(hide_secrets(text))
    place = visible(hide_secrets(place))
    lead = " ".join(filter(None, (code, f"{place}:" if place else "")))
    width = _columns_of(sys.stderr) - len(indent) - len(_GAP)
    plain = f"{lead} {text}".strip()
    lines = wrap(plain, max(width, len(_GAP)))
    for number, line in enumerate(lines):
        if number == 0 and line.startswith(lead):
            styled = click.style(code, fg="red", bold=True) if code else ""
            bold = click.style(f"{place}:", bold=True) if place else ""
            line = " ".join(filter(None, (styled, bold, line[len(lead) :].strip())))
        yield f"{indent}{_GAP if number else ''}{line}"


def _columns_of(stream: TextIO) -> int:
    """Columns of the terminal that shows the stream."""
    chosen = os.environ.get("COLUMNS", "")
    return int(chosen) if chosen.isdigit() and int(chosen) else os.get_terminal_size(stream.fileno()).columns or 80


@contextmanager
def byte_bar(size_bytes: int, label: str) -> Iterator[Callable[[int], None]]:
    """Draw a bar of ``size_bytes`` bytes while the block runs; yields what adds to it, from any thread."""
    from tqdm import tqdm

    lock = threading.Lock()
    with tqdm(
        total=size_bytes,
        desc=label,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
        leave=False,
    ) as bar:

        def add(done_bytes: int) -> None:
            with lock:
                bar.update(done_bytes)

        yield add
