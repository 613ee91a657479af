"""What is known of one plugin without running it, and the state that the kernel found it in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["BUILTIN", "LOCAL", "PluginInfo", "PluginState", "plugin_hints", "plugin_notes"]

PluginState = Literal["ok", "blocked", "incompatible", "broken", "shadowed", "corrupt"]
"""``ok`` registered · ``blocked`` by the policy · ``incompatible`` with this nxdt-core · ``broken``: its module or its
hooks fail · ``shadowed`` by the same distribution earlier on the path · ``corrupt``: its metadata cannot be read."""

BUILTIN = "builtin"
"""Name of the plugin that registers the core's own components."""

LOCAL = "local"
"""Stands for the distribution of a plugin file that the configuration names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginInfo:
    """One entry point of the group ``nxdt.plugins``, one local file, or the built-ins."""

    name: str
    """Entry point, or the stem of a local file."""
    dist: str
    """Distribution that brings it; ``local`` for a file that the configuration names."""
    version: str
    """Of the distribution; empty where it has none."""
    module: str
    """Value of the entry point: ``package.module`` or ``package.module:attribute``."""
    location: str
    """Directory of the path that the distribution was found in, or the local file."""
    requires: tuple[str, ...] = ()
    """Its ``Requires-Dist`` lines on nxdt-core, as written."""
    state: PluginState = "ok"
    reason: str = ""
    """Why the state is not ``ok``; one line."""
    note: str = ""
    """What importing it changed in the process that is not its own, such as functions of torch; one line."""

    hints: tuple[str, ...] = ()
    """What its authors should change, such as a missing range of nxdt-core; sentences without an end."""
    import_s: float = field(default=0.0, compare=False)
    """Seconds that importing and asking it took, what others had imported before left out."""

    @property
    def label(self) -> str:
        """Return the name for messages: ``'llama' (nxdt-plugin-llama 0.1.0)``."""
        return f"{self.name!r} ({self.dist} {self.version})" if self.version else f"{self.name!r} ({self.dist})"


def plugin_notes(plugins: Iterable[PluginInfo]) -> list[str]:
    """Return a line for each plugin with a note."""
    return [f"plugin {plugin.label}: {plugin.note}" for plugin in plugins if plugin.note]


def plugin_hints(plugins: Iterable[PluginInfo]) -> list[str]:
    """Return a line for each thing that the authors of a plugin should change."""
    return [f"plugin {plugin.label}: {hint}" for plugin in plugins for hint in plugin.hints]
