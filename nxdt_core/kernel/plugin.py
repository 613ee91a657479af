"""Metadata of one plugin, which are known without running it, the plugins that a run may use, and advice about one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

BUILTIN = "builtin"
"""Name of the plugin that registers the core's own components."""
LOCAL = "local"
"""Stands for the distribution of a plugin file that the configuration names."""


PluginState = Literal["ok", "blocked", "incompatible", "broken", "shadowed", "corrupt"]
"""``ok`` registered · ``blocked`` by the policy · ``incompatible`` with this nxdt-core · ``broken``: its module or its
hooks fail · ``shadowed`` by the same distribution earlier on the path · ``corrupt``: its metadata cannot be read."""
_ADVICE: Final[dict[PluginState, str]] = {
    "ok": "",
    "blocked": "change plugins.block or plugins.allow to use it",
    "incompatible": "pip install --upgrade {dist} nxdt-core",
    "broken": "repair or reinstall {dist}, or report the reason to its authors",
    "shadowed": "uninstall one of the two",
    "corrupt": "pip install --force-reinstall {dist}",
}


@lru_cache(maxsize=4096)
def normalise(dist: str) -> str:
    """Distribution name as package indices compare it (PEP 503): ``Nxdt_Plugin.X`` is ``nxdt-plugin-x``."""
    return re.sub(r"[-_.]+", "-", dist).lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginPolicy:
    """Plugins that may be loaded, and the preferred ones where several offer one name.

    Entries name a plugin by its entry point (``llama``) or by its distribution (``nxdt-plugin-llama``).
    """

    allow: tuple[str, ...] | None = None
    """Plugins that may be loaded. None allows all; the built-ins and ``local`` files are always allowed."""
    block: tuple[str, ...] = ()
    """Plugins that are never imported; wins over ``allow``."""
    schemes: tuple[str, ...] | None = None
    """Schemes of addresses that stores may serve; None allows all."""
    prefer: tuple[str, ...] = ()
    """Plugins in order of preference: the first of those that offer one short name is meant."""
    local: tuple[Path, ...] = ()
    """Plugin files (``.py``) that are loaded by path."""
    lock: Path | None = None
    """Lock file that the set of plugins must equal."""

    def objection(self, *, name: str, dist: str) -> str | None:
        """Return why the policy keeps a plugin out, or None where it does not."""
        if any(names(entry, name=name, dist=dist) for entry in self.block):
            return "named in plugins.block"
        if self.allow is not None and not any(names(entry, name=name, dist=dist) for entry in self.allow):
            return "not named in plugins.allow"
        return None


def names(entry: str, *, name: str, dist: str) -> bool:
    """Return whether a policy entry means the plugin ``name`` of the distribution ``dist``."""
    return entry == name or normalise(entry) == normalise(dist)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginInfo:
    """One entry point of the group ``nxdt.plugins``, one local file, or the built-ins."""

    name: str
    """Entry point, or the stem of a local file."""
    dist: str
    """Distribution that brings it; ``local`` for a file that the configuration names."""
    version: str
    """Version of the distribution; empty where it has none."""
    module: str
    """Value of the entry point: ``package.module`` or ``package.module:attribute``."""
    location: str
    """Directory of the path that the distribution was found in, or the local file."""
    requires: tuple[str, ...] = ()
    """The distribution's ``Requires-Dist`` lines on nxdt-core, as written."""
    state: PluginState = "ok"
    reason: str = ""
    """Reason why the state is not ``ok``; one line."""
    note: str = ""
    """Heavy libraries that its entry module imports; one line."""
    hints: tuple[str, ...] = ()
    """Changes that its authors should make, such as a missing range of nxdt-core; sentences without an end."""
    import_s: float = field(default=0.0, compare=False)
    """Seconds that importing and asking it took, what others had imported before left out."""

    @property
    def key(self) -> str:
        """Return the name under which pluggy has it, ``DIST:PLUGIN``; unique among the plugins that are ``ok``."""
        return f"{self.dist}:{self.name}"

    @property
    def label(self) -> str:
        """Return the name for messages: ``'llama' (nxdt-plugin-llama 0.1.0)``."""
        return f"{self.name!r} ({self.dist} {self.version})" if self.version else f"{self.name!r} ({self.dist})"


def plugin_notes(plugins: Iterable[PluginInfo]) -> list[str]:
    """Return a line for each plugin with a note."""
    return [f"plugin {plugin.label}: {plugin.note}" for plugin in plugins if plugin.note]


def diagnose(plugin: PluginInfo) -> str:
    """Return the state and reason: ``'tape' (nxdt-plugin-tape 1.0) is broken: module 'tape' does not exist``."""
    return f"{plugin.label} is {plugin.state}" + (f": {plugin.reason}" if plugin.reason else "")


def advise(plugin: PluginInfo) -> str:
    """Return what to do so that the plugin can be used; empty where it can."""
    if plugin.dist == LOCAL and plugin.state == "broken":
        return f"correct {plugin.location}"
    return _ADVICE[plugin.state].format(dist=plugin.dist)


class PluginDefect(Exception):
    """A plugin cannot be used; the text is the reason, in one line."""


def describe_failure(error: BaseException) -> str:
    """Return one line: type, first line of the message, and where it was raised."""
    import traceback  # only where something failed

    lines = str(error).strip().splitlines()
    if isinstance(error, SystemExit):
        text = f"called sys.exit({error.code!r})"
    else:
        text = f"raised {type(error).__name__}" + (f": {lines[0]}" if lines else "")
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith("<frozen")]
    if len(outside) < 2:
        return text
    return f"{text} ({outside[-1].filename}:{outside[-1].lineno})"
