"""Commands that plugins add through the hook ``nxdt_cli``."""

from __future__ import annotations

from collections.abc import Container

from nxdt_core.cli.lazy import LazyCommand
from nxdt_core.kernel import Kernel

__all__ = ["contributed_commands"]


def contributed_commands(*, reserved: Container[str]) -> dict[str, LazyCommand]:
    """Start the kernel with the default policy and collect the plugins' commands, sorted by name.

    A name that the core has, or that two plugins offer, is left out: nobody overrides anybody silently.
    """
    return {}
