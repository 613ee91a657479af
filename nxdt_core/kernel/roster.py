"""The plugins on their way from found to registered. Each step turns those that fail it into ``broken`` ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from time import perf_counter

from nxdt_core.api import KINDS, Kind
from nxdt_core.kernel.components.component import RegisteredComponent
from nxdt_core.kernel.components.declaration import Declaration, declare, fill_added_kinds
from nxdt_core.kernel.defect import PluginDefect
from nxdt_core.kernel.discovery.loading import import_plugin
from nxdt_core.kernel.discovery.side_effects import note_on_threads
from nxdt_core.kernel.discovery.threads import threads_detached
from nxdt_core.kernel.hooks.checks import HookSet, collect_hooks
from nxdt_core.kernel.hooks.facade import Hooks
from nxdt_core.kernel.hooks.table import own_hooks, specifications
from nxdt_core.kernel.plugin import PluginInfo

__all__ = ["Roster"]


class Roster:
    """Plugins in their final order, with what is known of each so far."""

    def __init__(self, plugins: Iterable[PluginInfo]) -> None:
        self.plugins = list(plugins)
        self._hooks: dict[int, HookSet] = {}
        self._declarations: dict[int, Declaration] = {}
        self._added: dict[int, tuple[RegisteredComponent, ...]] = {}

    def import_all(self, *, strict: bool) -> None:
        """Import the entry modules and check their hook functions."""
        hooks = specifications()
        for index in self._usable():
            plugin, begun = self.plugins[index], perf_counter()
            try:
                loaded, note = import_plugin(plugin, strict=strict)
                self.plugins[index] = replace(plugin, note=note, import_s=perf_counter() - begun)
                self._hooks[index] = collect_hooks(loaded, hooks)
                if not dir(self._hooks[index]):
                    self._hint(index, "its entry module implements no hook, so that it offers nothing")
            except PluginDefect as defect:
                self._drop(index, defect)

    def declare_all(self) -> None:
        """Call the registration hooks, then fill the kinds that plugins add."""
        for index in self._usable():
            plugin = self.plugins[index]
            try:
                with threads_detached() as started:
                    self._declarations[index] = declare(plugin, Hooks(own_hooks(plugin, self._hooks[index])))
                if started:
                    note = "; ".join(filter(None, (plugin.note, note_on_threads(started))))
                    self.plugins[index] = replace(plugin, note=note)
            except PluginDefect as defect:
                self._drop(index, defect)
        self._refuse_second_kinds()
        while not self._fill_added_kinds():
            pass  # a plugin that failed took its kinds with it: those that fill them are looked at again

    def added_kinds(self) -> dict[str, Kind]:
        """Return the kinds that usable plugins add, by name."""
        return {kind.name: kind for index in self._usable() for kind in self._declarations[index].kinds}

    def components(self) -> list[RegisteredComponent]:
        """Return the components of usable plugins."""
        return [
            component
            for index in self._usable()
            for component in (*self._declarations[index].components, *self._added[index])
        ]

    def registered(self) -> list[tuple[PluginInfo, HookSet]]:
        """Return the usable plugins and their hook functions."""
        return [(self.plugins[index], self._hooks[index]) for index in self._usable()]

    def _usable(self) -> list[int]:
        return [index for index, plugin in enumerate(self.plugins) if plugin.state == "ok"]

    def _hint(self, index: int, hint: str) -> None:
        self.plugins[index] = replace(self.plugins[index], hints=(*self.plugins[index].hints, hint))

    def _drop(self, index: int, defect: PluginDefect) -> None:
        self.plugins[index] = replace(self.plugins[index], state="broken", reason=str(defect))

    def _refuse_second_kinds(self) -> None:
        """Mark the later of two plugins that add one kind as broken: no plugin overrides another one."""
        adders: dict[str, PluginInfo] = {}
        for index in self._usable():
            for kind in self._declarations[index].kinds:
                first = adders.setdefault(kind.name, self.plugins[index])
                if first is not self.plugins[index]:
                    self._drop(index, PluginDefect(f"nxdt_kinds adds {kind.name!r}, which {first.label} adds"))
                    break

    def _fill_added_kinds(self) -> bool:
        """Check the components of added kinds; False where a plugin was dropped for it."""
        kinds = {kind.name: kind for kind in KINDS} | self.added_kinds()
        before = self._usable()
        for index in before:
            try:
                self._added[index] = fill_added_kinds(self._declarations[index], kinds)
            except PluginDefect as defect:
                self._drop(index, defect)
        return self._usable() == before
