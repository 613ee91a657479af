"""The shape of every ``nxdt`` command: a help text that ends with examples, and options that several share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

__all__ = ["Suggesting", "Verb", "VerbGroup", "as_json", "config_arguments", "print_json", "write_examples"]

_F = TypeVar("_F", bound=Callable[..., Any])


class Verb(click.Command):
    """A command with examples. Each example is a whole command line that a test parses."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples below the options."""
        write_examples(self.examples, formatter)


class Suggesting(click.Group):
    """A group with examples, which names the command that was probably meant."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples below the commands."""
        write_examples(self.examples, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of the first word; the usage error suggests a close one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            close = get_close_matches(args[0], self.list_commands(ctx), n=1)
            if not close:
                raise
            raise click.UsageError(f"{error.message} Did you mean '{close[0]}'?", ctx) from None


class VerbGroup(Suggesting):
    """A group of verbs, listed in the order of their definition."""

    command_class = Verb

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of definition."""
        return list(self.commands)


def write_examples(examples: Sequence[str], formatter: click.HelpFormatter) -> None:
    """Write the section of examples, one command line each, never wrapped: they are there to be copied."""
    with formatter.section("Examples"):
        for example in examples:
            formatter.write(f"{'':{formatter.current_indent}}{example}\n")


def as_json(function: _F) -> _F:
    """Add ``--json``."""
    return click.option("--json", "json_output", is_flag=True, help="Print JSON to standard output.")(function)


def config_arguments(function: _F) -> _F:
    """Add the arguments that name a configuration: a source and overrides."""
    function = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(function)
    return click.argument("source", metavar="CONFIG")(function)


def print_json(value: object) -> None:
    """Write one JSON document to standard output; its keys keep their order, a contract of the ``--json`` option."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
