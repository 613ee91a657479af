"""The shape of every ``nxdt`` command: a help text with examples, options that several share, and completions.

A group imports its commands when they are called: the core's, and those that plugins add.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from types import MappingProxyType
from typing import Any, TextIO, TypeVar

import click
from click.shell_completion import CompletionItem

from nxdt_core.system.visible_text import visible

_F = TypeVar("_F", bound=Callable[..., Any])
_MESSAGES = ("notes", "problems")
"""Keys of JSON below which texts are messages."""
_NAMES_ELSEWHERE = {"compare": "diff", "delete": "prune", "finetune": "train", "ls": "list", "run": "train"}
"""Other programs' names of commands → names here that are not like them."""


as_json = click.option("--json", "json_output", is_flag=True, help="Print JSON to standard output.")
"""Adds ``--json``."""


class WithExamples(click.Command):
    """A command or a group with examples, which are whole command lines; a test parses them."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples last, one line each and never wrapped: they are there to be copied."""
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")


class Verb(WithExamples):
    """A command with examples, which suggests a key of the configuration for an option that is one.

    An exit of a plugin's code within the command is an error.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Call the command's function."""
        from nxdt_core.kernel.discovery import exits_explained  # not for `nxdt --help`

        with exits_explained():
            return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; for an option that is a key of the configuration suggest ``KEY=VALUE``."""
        words = [*args]  # the parser empties it
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if all(parameter.name != "overrides" for parameter in self.params):
                raise
            from nxdt_core.config.read import fill
            from nxdt_core.config.schema import RunConfig
            from nxdt_core.config.tree import DEFAULT, Tree

            # Keys of the core's configuration with the name of the option, those with the shortest path alone.
            name = error.option_name.lstrip("-").replace("-", "_")
            core_keys = fill(Tree({}, {(): DEFAULT}), RunConfig).names.values()
            keys = [key for key in core_keys if f".{key}".endswith(f".{name}")]
            keys = [key for key in keys if key.count(".") == min(other.count(".") for other in keys)]
            if not keys:
                raise
            at = next(i for i, word in enumerate(words) if word.partition("=")[0] == error.option_name)
            value = words[at].partition("=")[2] or (words[at + 1 : at + 2] or ["VALUE"])[0]
            meant = " or ".join(repr(f"{key}={value}") for key in keys)
            raise click.UsageError(f"No such option {error.option_name!r}. Did you mean {meant}?", ctx) from None


def verb(
    *examples: str, name: str | None = None, short_help: str | None = None
) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that makes a command of a function; ``examples`` are whole command lines."""
    return click.command(name, cls=Verb, examples=examples, short_help=short_help)


def print_json(value: object) -> None:
    """Write one JSON document to standard output; its keys keep their order, a contract of the ``--json`` option.

    Notes and problems in it hide secrets, as they do on standard error.
    """
    say(json.dumps(_with_hidden(value), indent=2, ensure_ascii=False))


def attributes(value: object, *names: str) -> dict[str, Any]:
    """Return attributes of a record by their names, in this order, for :func:`print_json`."""
    return {name: getattr(value, name) for name in names}


def say(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Print text that may hold what files, data or other programs say; their control characters become visible.

    On standard error, where messages go, secrets are hidden.
    """
    text = without_secrets(text) if err else text
    click.echo(visible(text) + end, nl=False, err=err)


def discard_output(stream: TextIO) -> None:
    """Give up a stream whose reader went away: what is written to it from now on goes nowhere, without a complaint."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def print_note(text: str) -> None:
    """Print a note to standard error."""
    from nxdt_core.cli.terminal import print_wrapped

    print_wrapped("note", without_secrets(text), err=True)


def without_secrets(text: str) -> str:
    """Return a message without the secrets of the configurations that this process has read."""
    from nxdt_core.config.show import hide_secrets  # not for `nxdt --help`

    return hide_secrets(text)


def _with_hidden(value: Any, message: bool = False) -> Any:
    """Return the value without the secrets in its notes and problems."""
    if isinstance(value, str):
        return without_secrets(value) if message else value
    if isinstance(value, Mapping):
        return {key: _with_hidden(item, message or key in _MESSAGES) for key, item in value.items()}
    return [_with_hidden(item, message) for item in value] if isinstance(value, (list, tuple)) else value


def complete_source(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return recipes with their prefix, and let the shell complete files."""
    recipes = [f"recipe:{name}" for name in _recipes()]
    items = [CompletionItem(name) for name in recipes if name.startswith(incomplete)]
    return items if incomplete.startswith("recipe:") else [*items, CompletionItem(incomplete, type="file")]


def complete_recipe(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names of recipes."""
    return [CompletionItem(name) for name in _recipes() if name.startswith(incomplete)]


def complete_plugin(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names of plugins."""
    from nxdt_core.kernel import Kernel

    names = dict.fromkeys(plugin.name for plugin in Kernel.start().plugins)
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def complete_override(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return configuration keys, one section at a time; after ``key=`` the values that are known."""
    from nxdt_core.config.section import keys_of
    from nxdt_core.config.tree import join

    key, equals, value = incomplete.partition("=")
    if equals:
        return [CompletionItem(f"{key}={word}") for word in _values(key) if word.startswith(value)]
    section = key.rpartition(".")[0]
    names = {
        join(section, name) + ("." if key.section else "=")  # sections as ``section.name.``
        for cls in _classes(section)
        for name, key in keys_of(cls).items()
    }
    return [CompletionItem(name, type="open") for name in sorted(names) if name.startswith(incomplete)]


def _recipes() -> list[str]:
    from nxdt_core.config.sources import list_recipes
    from nxdt_core.kernel import Kernel

    return [recipe.name for recipe in list_recipes(Kernel.start())]


def _classes(section: str) -> Iterator[type]:
    """The dataclasses with the keys of a section: the core's, and those of all components that it may select."""
    from nxdt_core.config.schema import SLOTS, RunConfig, usable_class
    from nxdt_core.config.section import sections_of
    from nxdt_core.errors import NxdtError
    from nxdt_core.kernel import Kernel

    core = sections_of(RunConfig).get(section)
    if core is not None:
        yield core
    for slot in SLOTS:
        if slot.section == section:
            for component in Kernel.start().registry.all(slot.kind):
                with suppress(NxdtError):  # `nxdt plugins show` says what is wrong with it
                    if (section_class := usable_class(component)) is not None:
                        yield section_class


def _values(path: str) -> list[str]:
    """Names of components for a key that selects one; the words or truth values that another key takes."""
    from nxdt_core.config.schema import SLOTS
    from nxdt_core.config.section import keys_of
    from nxdt_core.kernel import Kernel

    for slot in SLOTS:
        if slot.key == path:
            return [component.record.name for component in Kernel.start().registry.all(slot.kind)]
    section, _, name = path.rpartition(".")
    keys = (keys_of(cls).get(name) for cls in _classes(section))
    return next((list(dict.fromkeys(_words(key.json_schema()))) for key in keys if key is not None), [])


def _words(schema: Mapping[str, Any]) -> Iterator[str]:
    """The words of a value's JSON Schema."""
    yield from (str(word) for word in schema.get("enum", ()) if word is not None)
    if schema.get("type") == "boolean":
        yield from ("true", "false")
    for choice in schema.get("anyOf", ()):
        yield from _words(choice)


def config_arguments(function: _F, *, required: bool = True) -> _F:
    """Add the arguments that name a configuration: a source and overrides."""
    overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_override)
    metavar = "CONFIG" if required else "[CONFIG]"
    source = click.argument("source", metavar=metavar, required=required, shell_complete=complete_source)
    return source(overrides(function))


optional_config_arguments = partial(config_arguments, required=False)
""":func:`config_arguments` for a command that also works without a configuration."""


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Import target of a command, and the line that a listing shows for it without importing it."""

    target: str
    """``package.module:attribute`` of a :class:`click.Command`."""
    summary: str
    section: str = "Commands"
    """Heading above the command in the help text of its group."""

    def load(self) -> click.Command:
        """Import the command, whose summary in other listings is this one, too."""
        from nxdt_core.kernel.discovery import exits_explained  # not for `nxdt --help`

        module, _, attribute = self.target.partition(":")
        with exits_explained():
            command: click.Command = getattr(import_module(module), attribute)
        command.short_help = self.summary
        return command


class SuggestingGroup(WithExamples, click.Group):
    """A group with examples, which names the command that was probably meant, and which plugins may add verbs to.

    Args:
        lazy: commands that are imported when they are called; they are listed first.
        place: the words between ``nxdt`` and a verb of the group; its name by default.
    """

    command_class = Verb

    def __init__(
        self,
        *args: Any,
        lazy: Mapping[str, LazyCommand] = MappingProxyType({}),
        place: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy
        self.place = (self.name or "") if place is None else place

    def summaries(self) -> dict[str, str]:
        """Return the group's own commands in the order of the help text, each with its line there."""
        imported = {name: command.get_short_help_str(limit=100) for name, command in self.commands.items()}
        return {name: entry.summary for name, entry in self.lazy.items()} | imported

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the group's own names, then those of plugins."""
        return [*self.summaries(), *self._contributed()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Find a command; plugins are asked only for a name that the group does not have."""
        command = self.lazy[cmd_name].load() if cmd_name in self.lazy else self.commands.get(cmd_name)
        if command is None and cmd_name in (contributed := self._contributed()):
            command = contributed[cmd_name][1]()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section, those of plugins last, from the summaries, importing nothing."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, summary in self.summaries().items():
            section = getattr(self.lazy.get(name), "section", "Commands")
            sections.setdefault(section, []).append((name, summary))
        sections["Commands of plugins"] = [(name, summary) for name, (summary, _) in self._contributed().items()]
        width = max((len(name) for rows in sections.values() for name, _ in rows), default=0)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl([(name.ljust(width), summary) for name, summary in rows])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of the first word; the usage error suggests a close one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            from nxdt_core.kernel import Kernel
            from nxdt_core.kernel.registry import missing_dist

            dist = missing_dist("command", f"{self.place} {args[0]}".strip(), Kernel.start().plugins)
            if dist is not None:
                raise click.UsageError(f"{error.message} Install it: pip install {dist}", ctx) from None
            commands = self.list_commands(ctx)
            close = get_close_matches(_NAMES_ELSEWHERE.get(args[0], args[0]), commands, n=1)
            if not close:
                raise
            raise click.UsageError(f"{error.message} Did you mean '{close[0]}'?", ctx) from None

    def _contributed(self) -> dict[str, tuple[str, Callable[[], click.Command]]]:
        """Return the summary of each command that plugins add, and what makes it, sorted by name.

        A name that is reserved, or that several plugins offer, is listed as ``plugin:name``: no plugin overrides
        another one silently. A group that the core has shows what plugins put into it itself.
        """
        reserved, offers = self.summaries(), _offers()
        commands: dict[str, tuple[str, Callable[[], click.Command]]] = {}
        for name in offers if not self.place else ():
            if name and name not in reserved:
                verbs = _named(offers[name], ())
                text = f"Commands of plugins: {', '.join(verbs)}."
                examples = [f"nxdt {name} {verb} --help" for verb in verbs]
                commands[name] = text, partial(SuggestingGroup, name=name, help=text, examples=examples)
        verbs_here = _named(offers.get(self.place, ()), reserved, commands)
        commands |= {name: (command.summary, command.load) for name, command in verbs_here.items()}
        return dict(sorted(commands.items()))


Offer = tuple[str, str, LazyCommand]
"""The plugin that offers a command, its verb, and the command."""


@cache
def _offers() -> Mapping[str, Sequence[Offer]]:
    """Return the offers by group; the kernel is started once, however often a command line is looked up in listings."""
    from nxdt_core.kernel import Kernel

    offers: dict[str, list[Offer]] = {}
    for plugin, commands in Kernel.start().call("nxdt_cli"):
        for record in commands:
            group, _, verb = record.name.rpartition(" ")
            command = LazyCommand(record.target, record.summary)
            offers.setdefault(group, []).append((plugin.name, verb, command))
    return offers


def _named(offers: Sequence[Offer], *taken: Container[str]) -> dict[str, LazyCommand]:
    times = Counter(verb for _, verb, _ in offers)
    names = {}
    for plugin, verb, command in offers:
        clash = times[verb] > 1 or any(verb in names_taken for names_taken in taken)
        names[f"{plugin}:{verb}" if clash else verb] = command
    return names
