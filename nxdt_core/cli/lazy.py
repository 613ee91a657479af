"""A command that is imported on use, so that ``nxdt --help`` costs no more than its own text."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import click

__all__ = ["LazyCommand"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyCommand:
    """Import target of a command, and the line that a listing shows for it without importing it."""

    target: str
    """``package.module:attribute`` of a :class:`click.Command`."""
    summary: str

    def load(self) -> click.Command:
        """Import the command."""
        module, _, attribute = self.target.partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command
