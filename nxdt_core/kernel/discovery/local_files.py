"""Plugin files that the configuration names in ``plugins.local``; never a file of the working directory by itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from nxdt_core.errors.plugins import LocalPluginMissing
from nxdt_core.kernel.discovery.loading import local_module_name
from nxdt_core.kernel.plugin import LOCAL, PluginInfo
from nxdt_core.kernel.policy import PluginPolicy

__all__ = ["find_local_plugins"]


def find_local_plugins(policy: PluginPolicy) -> list[PluginInfo]:
    """Return the files of ``policy.local`` as plugins, sorted by name.

    Raises:
        LocalPluginMissing: a path is not a file.
    """
    paths = list(dict.fromkeys(path.resolve() for path in policy.local))
    for path in paths:
        if not path.is_file():
            raise LocalPluginMissing(path=str(path))
    return sorted(_distinct(_with_state(path, policy) for path in paths), key=lambda plugin: plugin.name)


def _with_state(path: Path, policy: PluginPolicy) -> PluginInfo:
    plugin = PluginInfo(name=path.stem, dist=LOCAL, version="", module=local_module_name(path), location=str(path))
    objection = replace(policy, allow=None).objection(name=plugin.name, dist=LOCAL)
    return replace(plugin, state="blocked", reason=objection) if objection else plugin


def _distinct(plugins: Iterable[PluginInfo]) -> list[PluginInfo]:
    """A second file of one stem is shadowed: ``plugin:name`` could not tell them apart."""
    first: dict[str, PluginInfo] = {}
    distinct = []
    for plugin in plugins:
        winner = first.setdefault(plugin.name, plugin)
        hidden = replace(plugin, state="shadowed", reason=f"{winner.location} has the same name")
        distinct.append(plugin if winner is plugin else hidden)
    return distinct
