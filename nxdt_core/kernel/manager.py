"""Starts the kernel: finds plugins, imports their light modules, asks what they offer, and registers it.

Digests are imported where they are asked for: every command starts a kernel, few compare files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import final

import pluggy

from nxdt_core import __version__
from nxdt_core.api import KINDS, Kind
from nxdt_core.errors.plugins import PluginsUnusable
from nxdt_core.kernel import hooks as hooks_of_plugins
from nxdt_core.kernel.declaration import Declaration, declare, fill_added_kinds
from nxdt_core.kernel.discovery import find_local_plugins, find_plugins
from nxdt_core.kernel.hooks import HookSet, collect_hooks
from nxdt_core.kernel.loading import import_plugin
from nxdt_core.kernel.plugin import BUILTIN, PluginDefect, PluginInfo, advise, diagnose
from nxdt_core.kernel.policy import PluginPolicy, names
from nxdt_core.kernel.registry import RegisteredComponent, Registry

__all__ = ["Kernel"]


@final
class Kernel:
    """A set of plugins that was found, checked and registered; passed as an argument, never global.

    Example::

        kernel = Kernel.start(PluginPolicy(block=("nxdt-plugin-experimental",)))
        builder = kernel.registry.get("model", "llama").load_target()
    """

    __slots__ = ("_identities", "hooks", "plugins", "policy", "registry")

    def __init__(
        self, *, plugins: tuple[PluginInfo, ...], registry: Registry, hooks: pluggy.HookRelay, policy: PluginPolicy
    ) -> None:
        self.plugins = plugins
        """The built-ins, then the installed ones by distribution and entry point, then local files."""
        self.registry = registry
        self.hooks = hooks
        """Pluggy's: ``hooks.nxdt_validate_config(context=context)`` returns a list of
        :class:`nxdt_core.kernel.hooks.HookResult`."""
        self.policy = policy
        self._identities: dict[str, str] | None = None

    @classmethod
    def start(
        cls, policy: PluginPolicy | None = None, *, strict: bool = False, path: Sequence[str] | None = None
    ) -> Kernel:
        """Discover, judge, import and register. A plugin that cannot be used is kept, with its state and reason.

        Args:
            policy: What may be loaded; everything by default.
            strict: For tests and CI: an unusable plugin is an error, and so is an entry module that imports torch.
            path: Directories whose distributions are looked at; ``sys.path`` by default.

        Raises:
            LocalPluginMissing: a file of ``policy.local`` does not exist.
            PluginLockMismatch: the plugins are not those of ``policy.lock``; none was imported.
            PluginsUnusable: in strict mode, a plugin is incompatible, broken, shadowed or corrupt.
        """
        policy = policy or PluginPolicy()
        found = [_builtin(), *find_plugins(policy, path), *find_local_plugins(policy)]
        if policy.lock is not None:
            from nxdt_core.kernel.lock import compare_with_lock

            compare_with_lock(found, policy.lock)
        candidates = [_Candidate(plugin) for plugin in found]
        manager = hooks_of_plugins.new_manager()
        with redirect_stdout(sys.stderr):  # a module that prints must not spoil the output of --json
            for each in _usable(candidates):
                each.attempt(partial(each.load, strict=strict))
            for each in _usable(candidates):
                each.attempt(partial(each.declare, manager))
            _fill_added_kinds(candidates)
        plugins = tuple(each.plugin for each in candidates)
        if strict:
            _refuse_unusable(plugins)
        hooks_of_plugins.register(manager, ((each.plugin, each.hooks) for each in _usable(candidates)))
        registry = Registry(
            kinds=(*KINDS, *_added_kinds(candidates).values()),
            components=[found for each in _usable(candidates) for found in (*each.declaration.components, *each.added)],
            plugins=plugins,
            prefer=policy.prefer,
            schemes=policy.schemes,
        )
        return cls(plugins=plugins, registry=registry, hooks=manager.hook, policy=policy)

    def fingerprint(self) -> str:
        """Digest of the usable plugins and their files, equal on every rank that may train together."""
        from nxdt_core.kernel.fingerprint import fingerprint

        return fingerprint(self.identities())

    def identities(self) -> Mapping[str, str]:
        """Return distribution, version and digest of the files of each usable plugin, by its name."""
        if self._identities is None:
            from nxdt_core.kernel.fingerprint import identify_plugins

            self._identities = identify_plugins(self.plugins)
        return self._identities

    def unmatched_policy(self) -> tuple[str, ...]:
        """Return the entries of the policy that name no plugin that was found: often misspelt, so worth a warning."""
        return tuple(
            entry
            for entry in self.policy.entries()
            if not any(names(entry, name=plugin.name, dist=plugin.dist) for plugin in self.plugins)
        )


class _Candidate:
    """A plugin on its way from found to registered, with what is known of it so far."""

    hooks: HookSet
    declaration: Declaration
    added: tuple[RegisteredComponent, ...] = ()
    """Components of kinds that plugins add."""

    def __init__(self, plugin: PluginInfo) -> None:
        self.plugin = plugin

    def attempt(self, step: Callable[[], None]) -> None:
        """Take a step; a plugin that fails it is broken."""
        try:
            step()
        except PluginDefect as defect:
            self.plugin = replace(self.plugin, state="broken", reason=str(defect))

    def load(self, *, strict: bool) -> None:
        """Import the entry module and check its hook functions."""
        begun = perf_counter()
        loaded, note = import_plugin(self.plugin, strict=strict)
        self.plugin = replace(self.plugin, note=note, import_s=perf_counter() - begun)
        self.hooks = collect_hooks(self.plugin, loaded)
        if not dir(self.hooks):
            hint = "its entry module implements no hook, so that it offers nothing"
            self.plugin = replace(self.plugin, hints=(*self.plugin.hints, hint))

    def declare(self, manager: pluggy.PluginManager) -> None:
        """Call the registration hooks. ``manager`` has no plugin, before and after."""
        hooks_of_plugins.register(manager, [(self.plugin, self.hooks)])
        try:
            self.declaration = declare(self.plugin, manager.hook)
        finally:
            manager.unregister(self.hooks)


def _usable(candidates: Iterable[_Candidate]) -> list[_Candidate]:
    return [each for each in candidates if each.plugin.state == "ok"]


def _added_kinds(candidates: Iterable[_Candidate]) -> dict[str, Kind]:
    """Return the kinds that usable plugins add, by name."""
    return {kind.name: kind for each in _usable(candidates) for kind in each.declaration.kinds}


def _fill_added_kinds(candidates: Sequence[_Candidate]) -> None:
    """Check the components of kinds that plugins add. A plugin that fails takes its kinds with it, so that those that
    fill them are looked at again."""
    adders: dict[str, PluginInfo] = {}
    for each in _usable(candidates):
        each.attempt(partial(_refuse_second_kinds, each, adders))
    before: list[_Candidate] = []
    while before != (before := _usable(candidates)):
        kinds = {kind.name: kind for kind in KINDS} | _added_kinds(candidates)
        for each in before:
            each.attempt(partial(_fill, each, kinds))


def _refuse_second_kinds(candidate: _Candidate, adders: dict[str, PluginInfo]) -> None:
    """Refuse the later of two plugins that add one kind: no plugin overrides another one."""
    for kind in candidate.declaration.kinds:
        first = adders.setdefault(kind.name, candidate.plugin)
        if first is not candidate.plugin:
            raise PluginDefect(f"nxdt_kinds adds {kind.name!r}, which {first.label} adds")


def _fill(candidate: _Candidate, kinds: Mapping[str, Kind]) -> None:
    candidate.added = fill_added_kinds(candidate.declaration, kinds)


def _builtin() -> PluginInfo:
    """The core's own components, as a plugin like any other. (Named by text: they are on the level of plugins.)"""
    root = Path(__file__).parent.parent.parent
    return PluginInfo(
        name=BUILTIN, dist="nxdt-core", version=__version__, module="nxdt_core.builtins", location=str(root)
    )


def _refuse_unusable(plugins: Sequence[PluginInfo]) -> None:
    problems = [f"{diagnose(p)} ({advise(p)})" for p in plugins if p.state not in ("ok", "blocked")]
    if problems:
        raise PluginsUnusable(problems=tuple(problems))
