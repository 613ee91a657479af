"""The shape of every ``nxdt`` command: a help text that ends with examples, and options that several share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
    "without_secrets",
    "write_examples",
]

_F = TypeVar("_F", bound=Callable[..., Any])
_MESSAGES = ("notes", "problems")
"""Keys of JSON below which texts are messages."""


class Verb(click.Command):
    """A command with examples. Each example is a whole command line that a test parses."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; for an option that is a key of the configuration suggest ``KEY=VALUE``."""
        given = [*args]  # the parser empties it
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            keys = _keys_like(error.option_name) if any(each.name == "overrides" for each in self.params) else []
            if not keys:
                raise
            at = next(i for i, word in enumerate(given) if word.partition("=")[0] == error.option_name)
            value = given[at].partition("=")[2] or (given[at + 1 : at + 2] or ["VALUE"])[0]
            meant = " or ".join(repr(f"{key}={value}") for key in keys)
            raise click.UsageError(f"No such option {error.option_name!r}. Did you mean {meant}?", ctx) from None

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples below the options."""
        write_examples(self.examples, formatter)


def _keys_like(option: str) -> list[str]:
    """Return the keys of the core's configuration with the name of an option, those with the shortest path alone."""
    from nxdt_core.config.complete import Completion
    from nxdt_core.config.schema import Composition
    from nxdt_core.config.tree import Node, Origin

    name = option.lstrip("-").replace("-", "_")
    known = Completion(Node({}, Origin(kind="file", where="")), Composition()).known
    found = [key for key in known if f".{key}".endswith(f".{name}")]
    return [key for key in found if key.count(".") == min(each.count(".") for each in found)]


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
    """Write one JSON document to standard output; its keys keep their order, a contract of the ``--json`` option.

    Notes and problems in it hide secrets, as they do on standard error.
    """
    say(json.dumps(_with_hidden(value), indent=2, ensure_ascii=False))


def say(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Print text that may hold what files, data or other programs say; their control characters become visible.

    On standard error, where messages go, secrets are hidden.
    """
    text = without_secrets(text) if err else text
    click.echo(visible(text) + end, nl=False, err=err)


def print_note(text: str) -> None:
    """Print a note to standard error."""
    from nxdt_core.cli.terminal.table import print_wrapped

    print_wrapped("note", without_secrets(text), err=True)


def without_secrets(text: str) -> str:
    """Return a message without the secrets of the configurations that this process has read."""
    from nxdt_core.config.secrets import hide_secrets  # not for `nxdt --help`

    return hide_secrets(text)


def _with_hidden(value: Any, message: bool = False) -> Any:
    """Return the value without the secrets in its notes and problems."""
    if isinstance(value, str):
        return without_secrets(value) if message else value
    if isinstance(value, Mapping):
        return {key: _with_hidden(each, message or key in _MESSAGES) for key, each in value.items()}
    return [_with_hidden(each, message) for each in value] if isinstance(value, (list, tuple)) else value
