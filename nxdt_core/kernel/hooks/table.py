"""Which plugin's functions implement each hook, in calling order. Pluggy keeps the order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import pluggy

from nxdt_core.api import PROJECT
from nxdt_core.kernel.hooks.calls import Implementation
from nxdt_core.kernel.hooks.checks import MARK, HookSet, signature_of
from nxdt_core.kernel.hookspecs import PHASES
from nxdt_core.kernel.plugin import PluginInfo

__all__ = ["HookTable", "order_hooks", "own_hooks", "specifications"]

HookTable = Mapping[str, tuple[Implementation, ...]]


@cache
def specifications() -> Mapping[str, inspect.Signature]:
    """Signature of every hook by name."""
    return {name: signature_of(getattr(phase, name)) for phase in PHASES for name in phase.__all__}


@cache
def _all_specifications() -> ModuleType:
    """The specifications without what else is in their modules, at which pluggy would look each time."""
    module = ModuleType("nxdt_core.kernel.hookspecs")
    vars(module).update({name: getattr(phase, name) for phase in PHASES for name in phase.__all__})
    return module


def own_hooks(plugin: PluginInfo, hooks: HookSet) -> HookTable:
    """Return the implementations of one plugin alone."""
    table: dict[str, tuple[Implementation, ...]] = {}
    for name, function in vars(hooks).items():
        hook = getattr(function, MARK).get("specname") or name
        table[hook] = (*table.get(hook, ()), _implementation(plugin, function))
    return table


def order_hooks(plugins: Sequence[tuple[PluginInfo, HookSet]]) -> HookTable:
    """Return the implementations of all plugins: ``tryfirst`` ones, the others in the order given, ``trylast`` ones."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(_all_specifications())
    by_name = {f"{plugin.dist}:{plugin.name}": plugin for plugin, _ in plugins}
    for plugin, hooks in reversed(plugins):  # pluggy calls what was registered last first
        manager.register(hooks, name=f"{plugin.dist}:{plugin.name}")
    return {
        hook: tuple(_implementation(by_name[i.plugin_name], i.function) for i in reversed(_registered(manager, hook)))
        for phase in PHASES
        for hook in phase.__all__
    }


def _registered(manager: pluggy.PluginManager, hook: str) -> list[Any]:
    caller: pluggy.HookCaller = getattr(manager.hook, hook)
    return caller.get_hookimpls()


def _implementation(plugin: PluginInfo, function: Callable[..., Any]) -> Implementation:
    return Implementation(
        plugin=plugin.name,
        dist=plugin.dist,
        function=function,
        takes_context=bool(signature_of(function).parameters),
    )
