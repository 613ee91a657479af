"""The shape of every ``nxdt`` command: a help text that ends with examples, and options that several share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from nxdt_core.visible_text import visible

__all__ = [
    "Verb",
    "as_json",
    "completed_by",
    "config_arguments",
    "optional_config_arguments",
    "print_json",
    "print_note",
    "say",
    "write_examples",
]

_F = TypeVar("_F", bound=Callable[..., Any])


class Verb(click.Command):
    """A command with examples. Each example is a whole command line that a test parses."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples below the options."""
        write_examples(self.examples, formatter)


def write_examples(examples: Sequence[str], formatter: click.HelpFormatter) -> None:
    """Write the section of examples, one command line each, never wrapped: they are there to be copied."""
    with formatter.section("Examples"):
        for example in examples:
            formatter.write(f"{'':{formatter.current_indent}}{example}\n")


def as_json(function: _F) -> _F:
    """Add ``--json``."""
    return click.option("--json", "json_output", is_flag=True, help="Print JSON to standard output.")(function)


def completed_by(name: str) -> Callable[[click.Context, click.Parameter, str], list[Any]]:
    """Return what completes an argument: a function of :mod:`nxdt_core.cli.terminal.completions`, imported on use."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from nxdt_core.cli.terminal import completions

        found: list[Any] = getattr(completions, name)(ctx, param, incomplete)
        return found

    return complete


def _config_arguments(*, required: bool) -> Callable[[_F], _F]:
    def add(function: _F) -> _F:
        completed = completed_by("complete_override")
        function = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=completed)(function)
        metavar, complete = "CONFIG" if required else "[CONFIG]", completed_by("complete_source")
        return click.argument("source", metavar=metavar, required=required, shell_complete=complete)(function)

    return add


config_arguments = _config_arguments(required=True)
"""Decorator that adds the arguments that name a configuration: a source and overrides."""
optional_config_arguments = _config_arguments(required=False)
"""As :data:`config_arguments`, where a command also does something without a configuration."""


def print_json(value: object) -> None:
    """Write one JSON document to standard output; its keys keep their order, a contract of the ``--json`` option."""
    say(json.dumps(value, indent=2, ensure_ascii=False))


def say(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Print text that may hold what files, data or other programs say; their control characters become visible."""
    click.echo(visible(text) + end, nl=False, err=err)


def print_note(text: str) -> None:
    """Print a note to standard error."""
    from nxdt_core.cli.terminal.table import print_wrapped

    print_wrapped("note", text, err=True)
