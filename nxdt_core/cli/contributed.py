"""Commands that plugins add through the hook ``nxdt_cli``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from nxdt_core.cli.lazy import LazyCommand
from nxdt_core.kernel import Kernel

__all__ = ["contributed_commands"]


def contributed_commands(*, reserved: Container[str]) -> dict[str, LazyCommand]:
    """Start the kernel with the default policy and collect the plugins' commands, sorted by name.

    Args:
        reserved: names of the core's commands.

    Returns:
        Commands by verb. A name that is reserved, or that several plugins offer, stands as ``plugin:name``:
        nobody overrides anybody silently.
    """
    offers = [(result.plugin, record) for result in Kernel.start().hooks.nxdt_cli() for record in result.value]
    times = Counter(record.name for _, record in offers)
    commands = {}
    for plugin, record in offers:
        taken = record.name in reserved or times[record.name] > 1
        verb = f"{plugin}:{record.name}" if taken else record.name
        commands[verb] = LazyCommand(target=record.target, summary=record.summary)
    return dict(sorted(commands.items()))
