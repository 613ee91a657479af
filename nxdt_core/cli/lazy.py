"""Command groups whose commands are imported on use, so that ``nxdt --help`` costs no more than its own text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click

from nxdt_core.cli.verb import Suggesting

__all__ = ["LazyCommand", "LazyGroup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyCommand:
    """Where a command lies, and the line that a listing shows for it without importing it."""

    target: str
    """``package.module:attribute`` of a :class:`click.Command`."""
    summary: str

    def load(self) -> click.Command:
        """Import the command."""
        module, _, attribute = self.target.partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command


class LazyGroup(Suggesting):
    """A group over :class:`LazyCommand` entries, listed in the order in which they were given."""

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def summaries(self) -> dict[str, str]:
        """Names in the order of declaration: the order in which a newcomer needs them."""
        return {name: entry.summary for name, entry in self.lazy.items()}

    def own_command(self, name: str) -> click.Command | None:
        """Import and return one command; None where there is none of that name."""
        entry = self.lazy.get(name)
        return entry.load() if entry else None
