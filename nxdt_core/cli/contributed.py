"""Commands that plugins add through the hook ``nxdt_cli``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from nxdt_core.cli.lazy import LazyCommand
from nxdt_core.kernel import Kernel

__all__ = ["PluginGroup", "contributed_commands"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A command and the plugin that offers it."""

    plugin: str
    verb: str
    command: LazyCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginGroup:
    """A group that the core does not have: the verbs that plugins put into it."""

    name: str
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
    return dict(
        sorted([*own.items(), *((name, PluginGroup(name=name, verbs=verbs)) for name, verbs in groups.items())])
    )


@cache
def _offers() -> Mapping[str, Sequence[Offer]]:
    """Return the offers by group; the kernel is started once, however often a command line is looked up in listings."""
    offers: dict[str, list[Offer]] = {}
    for result in Kernel.start().hooks.nxdt_cli():
        for record in result.value:
            group, _, verb = record.name.rpartition(" ")
            offers.setdefault(group, []).append(
                Offer(
                    plugin=result.plugin, verb=verb, command=LazyCommand(target=record.target, summary=record.summary)
                )
            )
    return offers


def _named(offers: Sequence[Offer], *taken: Container[str]) -> dict[str, LazyCommand]:
    times = Counter(offer.verb for offer in offers)
    names = {}
    for offer in offers:
        clash = times[offer.verb] > 1 or any(offer.verb in own for own in taken)
        names[f"{offer.plugin}:{offer.verb}" if clash else offer.verb] = offer.command
    return names
