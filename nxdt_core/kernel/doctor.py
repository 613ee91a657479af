"""Says what is wrong with a plugin and what its user can do, in one sentence each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from nxdt_core.kernel.integrity.editable import stale_metadata
from nxdt_core.kernel.plugin import LOCAL, PluginInfo, PluginState

__all__ = ["advise", "complaints", "diagnose"]

_ADVICE: Final[dict[PluginState, str]] = {
    "ok": "",
    "blocked": "change plugins.block or plugins.allow to use it",
    "incompatible": "pip install --upgrade {dist} nxdt-core",
    "broken": "repair or reinstall {dist}, or report the reason to its authors",
    "shadowed": "uninstall one of the two",
    "corrupt": "pip install --force-reinstall {dist}",
}


def diagnose(plugin: PluginInfo) -> str:
    """Return the state and reason: ``'tape' (nxdt-plugin-tape 1.0) is broken: module 'tape' does not exist``."""
    return f"{plugin.label} is {plugin.state}" + (f": {plugin.reason}" if plugin.reason else "")


def advise(plugin: PluginInfo) -> str:
    """Return what to do so that the plugin can be used; empty where it can."""
    if plugin.dist == LOCAL and plugin.state == "broken":
        return f"correct {plugin.location}"
    return _ADVICE[plugin.state].format(dist=plugin.dist)


def complaints(plugins: Iterable[PluginInfo]) -> Iterator[str]:
    """Yield a line for each thing that is wrong with a plugin; one that is blocked is as its user wants it."""
    for plugin in plugins:
        if plugin.state not in ("ok", "blocked"):
            yield f"plugin {diagnose(plugin)} ({advise(plugin)})"
        for line in (plugin.note, *plugin.hints, stale_metadata(plugin)):
            if line:
                yield f"plugin {plugin.label}: {line}"
