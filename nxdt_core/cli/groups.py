"""Groups of commands that are imported when they are called: the core's, and those that plugins add."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

import click

from nxdt_core.cli.verb import Verb, WithExamples


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


_NAMES_ELSEWHERE = {"compare": "diff", "delete": "prune", "finetune": "train", "ls": "list", "run": "train"}
"""Other programs' names of commands → names here that are not like them."""


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
        own = {name: command.get_short_help_str(limit=100) for name, command in self.commands.items()}
        return {name: entry.summary for name, entry in self.lazy.items()} | own

    def own_command(self, name: str) -> click.Command | None:
        """Return one of these; None where there is none of that name."""
        return self.lazy[name].load() if name in self.lazy else self.commands.get(name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the group's own names, then those of plugins."""
        return [*self.summaries(), *self._contributed()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Find a command; plugins are asked only for a name that the group does not have."""
        command = self.own_command(cmd_name)
        if command is not None:
            return command
        entry = self._contributed().get(cmd_name)
        if entry is None:
            return None
        if isinstance(entry, LazyCommand):
            return entry.load()
        examples = [f"nxdt {cmd_name} {verb} --help" for verb in entry.verbs]
        return SuggestingGroup(name=cmd_name, help=entry.summary, examples=examples)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section, those of plugins last, from the summaries, importing nothing."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, summary in self.summaries().items():
            section = getattr(self.lazy.get(name), "section", "Commands")
            sections.setdefault(section, []).append((name, summary))
        sections["Commands of plugins"] = [(name, entry.summary) for name, entry in self._contributed().items()]
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
            known = self.list_commands(ctx)
            close = get_close_matches(_NAMES_ELSEWHERE.get(args[0], args[0]), known, n=1)
            if not close:
                raise
            raise click.UsageError(f"{error.message} Did you mean '{close[0]}'?", ctx) from None

    def _contributed(self) -> dict[str, LazyCommand | PluginGroup]:
        return contributed_commands(self.place, reserved=self.summaries())


Offer = tuple[str, str, LazyCommand]
"""The plugin that offers a command, its verb, and the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginGroup:
    """A group that the core does not have: the verbs that plugins put into it."""

    verbs: Mapping[str, LazyCommand]

    @property
    def summary(self) -> str:
        """The line of a listing."""
        return f"Commands of plugins: {', '.join(self.verbs)}."


def contributed_commands(group: str, *, reserved: Container[str]) -> dict[str, LazyCommand | PluginGroup]:
    """Start the kernel with the default policy and collect the plugins' commands of one group, sorted by name.

    Args:
        group: name of a group; empty for commands directly under ``nxdt``.
        reserved: names of the core's commands in it. A group of the core shows what plugins put into it itself.

    Returns:
        Commands by verb. A name that is reserved, or that several plugins offer, is listed as ``plugin:name``:
        no plugin overrides another one silently.
    """
    offers = _offers()
    groups = {} if group else {name: _named(offers[name], ()) for name in offers if name and name not in reserved}
    own = _named(offers.get(group, ()), reserved, groups)
    return dict(sorted([*own.items(), *((name, PluginGroup(verbs=verbs)) for name, verbs in groups.items())]))


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
        clash = times[verb] > 1 or any(verb in own for own in taken)
        names[f"{plugin}:{verb}" if clash else verb] = command
    return names
