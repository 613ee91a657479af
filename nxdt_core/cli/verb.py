"""The shape of every ``nxdt`` command: a help text that ends with examples, and options that several share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nxdt_core.visible_text import visible

if TYPE_CHECKING:
    from nxdt_core.cli.contributed import PluginGroup
    from nxdt_core.cli.lazy import LazyCommand

__all__ = [
    "Suggesting",
    "Verb",
    "VerbGroup",
    "as_json",
    "config_arguments",
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


class Suggesting(click.Group):
    """A group with examples, which names the command that was probably meant, and which plugins may add verbs to."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def summaries(self) -> dict[str, str]:
        """The group's own commands in the order of the help text, each with its line there."""
        return {name: command.get_short_help_str(limit=100) for name, command in self.commands.items()}

    def own_command(self, name: str) -> click.Command | None:
        """One of these; None where there is none of that name."""
        return self.commands.get(name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The group's own names, then those of plugins."""
        return [*self.summaries(), *self._contributed()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Find a command; plugins are asked only for a name that the group does not have."""
        command = self.own_command(cmd_name)
        if command is not None:
            return command
        entry = self._contributed().get(cmd_name)
        return entry.load() if entry else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write both listings from the summaries, importing nothing."""
        contributed = {name: entry.summary for name, entry in self._contributed().items()}
        for title, rows in (("Commands", self.summaries()), ("Commands of plugins", contributed)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(list(rows.items()))

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

    def _contributed(self) -> dict[str, LazyCommand | PluginGroup]:
        from nxdt_core.cli.contributed import contributed_commands

        return contributed_commands(self.place, reserved=self.summaries())

    @property
    def place(self) -> str:
        """The words between ``nxdt`` and a verb of this group."""
        return self.name or ""


class VerbGroup(Suggesting):
    """A group of verbs, listed in the order of their definition."""

    command_class = Verb


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
    say(json.dumps(value, indent=2, ensure_ascii=False))


def say(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Print text that may hold what files, data or other programs say; their control characters become visible."""
    click.echo(visible(text) + end, nl=False, err=err)


def print_note(text: str) -> None:
    """Print a note to standard error."""
    say(f"note: {text}", err=True)
