"""How an error looks: wrapped on a terminal, with the code first; one line per problem elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import click

from nxdt_core.cli.terminal.table import wrap
from nxdt_core.config.secrets import hide_secrets
from nxdt_core.errors import NxdtError
from nxdt_core.errors.configuration import ConfigError, ConfigProblem
from nxdt_core.visible_text import visible

__all__ = ["error_text"]

_INDENT = "  "
_EXPLAINED = 4
"""Codes that the last line names."""


def error_text(error: NxdtError) -> str:
    """Return what standard error gets of an error that ends a command."""
    problems = error.problems if isinstance(error, ConfigError) else ()
    codes = list(dict.fromkeys(problem.shown_code for problem in problems)) or [error.code]
    last = f"More: nxdt explain {' '.join(codes[:_EXPLAINED])}"
    if sys.stderr.isatty():
        return "\n".join([*_terminal_lines(error, problems), *([""] if problems else []), click.style(last, dim=True)])
    code, _, rest = hide_secrets(str(error)).partition(" ")
    return f"{click.style(code, fg='red', bold=True)} {rest}\n  {last}"


def _terminal_lines(error: NxdtError, problems: tuple[ConfigProblem, ...]) -> Iterator[str]:
    yield from _hanging(error.code, "", error.what(), "")
    if not isinstance(error, ConfigError):
        for line in error.do().split("\n"):
            yield from _hanging("", "", line.strip(), _INDENT)
        return
    for problem in problems:
        yield ""
        key = f"{problem.key}: " if problem.key else ""
        yield from _hanging(problem.shown_code, problem.place, f"{key}{problem.what()} {problem.do()}".strip(), _INDENT)


def _hanging(code: str, place: str, text: str, indent: str) -> Iterator[str]:
    """Lines of one problem; those after the first are indented further."""
    text = visible(hide_secrets(text))
    place = visible(hide_secrets(place))
    lead = " ".join(filter(None, (code, f"{place}:" if place else "")))
    width = _columns() - len(indent) - len(_INDENT)
    plain = f"{lead} {text}".strip()
    lines = [line for each in plain.split("\n") for line in wrap(each, max(width, len(_INDENT)))]
    for number, line in enumerate(lines):
        if number == 0 and line.startswith(lead):
            styled = click.style(code, fg="red", bold=True) if code else ""
            bold = click.style(f"{place}:", bold=True) if place else ""
            line = " ".join(filter(None, (styled, bold, line[len(lead) :].strip())))
        yield f"{indent}{_INDENT if number else ''}{line}"


def _columns() -> int:
    """Columns of the terminal that shows standard error."""
    chosen = os.environ.get("COLUMNS", "")
    return int(chosen) if chosen.isdigit() and int(chosen) else os.get_terminal_size(sys.stderr.fileno()).columns or 80
