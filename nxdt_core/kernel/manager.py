"""Starts the kernel: finds plugins, imports their light modules, asks what they offer, and registers it.

What a plugin's registration hooks yield is checked, and taken as a whole or not at all. Digests are imported where they
are asked for: every command starts a kernel, few compare files.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, final

import pluggy

from nxdt_core import __version__
from nxdt_core.api import CAPABILITIES, KINDS, AdapterComponent, CliCommand, Component, Kind
from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import listing, one_of
from nxdt_core.errors.plugins import PluginHookFailed, PluginsUnusable
from nxdt_core.kernel.discovery import find_local_plugins, find_plugins, import_plugin
from nxdt_core.kernel.hooks import HookManager
from nxdt_core.kernel.plugin import (
    BUILTIN,
    LOCAL,
    PluginDefect,
    PluginInfo,
    PluginPolicy,
    advise,
    describe_failure,
    diagnose,
    names,
)
from nxdt_core.kernel.registry import RegisteredComponent, Registry

_OWN = {kind.name: kind for kind in KINDS}
"""The kernel's own kinds by name."""
_BY_HOOK = {kind.hook: kind for kind in KINDS}
_RECORDS = {"nxdt_kinds": Kind, "nxdt_cli": CliCommand, **{kind.hook: kind.record for kind in KINDS}}
"""Class of the records that a registration hook gives."""
_BEFORE_CONFIG = {"nxdt_cli": "command", "nxdt_launchers": "launcher", "nxdt_metrics": "metric", "nxdt_tasks": "task"}
"""Hooks for what commands look for before they read a configuration, which may name local plugins."""


def _items(hook: str, value: object, record: type) -> list[Any]:
    """Return what a hook gave, a list of records of one class."""
    if not isinstance(value, list):
        raise PluginDefect(f"{hook} yields {type(value).__name__} where a list of records belongs")
    for item in value:
        if type(item) is not record:  # records of other kinds are subclasses, too
            raise PluginDefect(f"{hook} yields a {type(item).__name__}, not a {record.__name__}")
    return value


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Kernel:
    """A set of plugins that was found, checked and registered; passed as an argument, never global.

    Example::

        kernel = Kernel.start(PluginPolicy(block=("nxdt-plugin-experimental",)))
        builder = kernel.registry.get("model", "llama").load_target()
    """

    plugins: tuple[PluginInfo, ...]
    """The built-ins, then the installed ones by distribution and entry point, then local files."""
    registry: Registry
    manager: HookManager
    """Pluggy's manager, with the modules of the usable plugins as ``DIST:PLUGIN``."""
    policy: PluginPolicy
    _identities: dict[str, str] | None = field(default=None, init=False)

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
        root = Path(__file__).parent.parent.parent
        # Named by text: they are on the level of plugins.
        builtin = PluginInfo(
            name=BUILTIN, dist="nxdt-core", version=__version__, module="nxdt_core.builtins", location=str(root)
        )
        discovered = [builtin, *find_plugins(policy, path), *find_local_plugins(policy)]
        if policy.lock is not None:
            from nxdt_core.kernel.lock import compare_with_lock

            compare_with_lock(discovered, policy.lock)
        manager = HookManager()
        candidates = list(map(Candidate, discovered))
        with redirect_stdout(sys.stderr):  # a module that prints must not spoil the output of --json
            owners: dict[int, str] = {}
            for candidate in candidates:
                candidate.attempt(candidate.load, strict, owners)
            by_key: dict[str, Candidate] = {}
            for candidate in reversed(candidates):  # pluggy calls what was registered last first
                candidate.attempt(candidate.register, manager, by_key)
            adders: dict[str, PluginInfo] = {}
            for hook in (*_RECORDS, "nxdt_components"):
                for implementation in manager.implementations(hook):
                    owner = by_key[implementation.plugin_name]
                    owner.attempt(owner.take, manager, hook, implementation, adders)
            complete = False
            while not complete:
                # A plugin that fails takes its kinds with it, so that those that fill them are looked at again.
                kinds, complete = dict(_OWN), True
                usable = [candidate for candidate in candidates if candidate.plugin.state == "ok"]
                for candidate in usable:
                    kinds.update(candidate.kinds)
                for candidate in usable:
                    complete &= candidate.attempt(candidate.fill_kinds, kinds)
        for key, candidate in by_key.items():
            if candidate.plugin.state != "ok":
                manager.unregister(name=key)
        plugins = tuple(candidate.plugin for candidate in candidates)
        components = [component for candidate in usable for component in (*candidate.components, *candidate.added)]
        unusable = [plugin for plugin in plugins if plugin.state not in ("ok", "blocked")]
        if strict and unusable:
            raise PluginsUnusable(problems=tuple(f"{diagnose(plugin)} ({advise(plugin)})" for plugin in unusable))
        registry = Registry(kinds=tuple(kinds.values()), components=components, plugins=plugins, policy=policy)
        return cls(plugins=plugins, registry=registry, manager=manager, policy=policy)

    def call(self, hook: str, **arguments: object) -> Iterator[tuple[PluginInfo, Any]]:
        """Call a hook's implementations in pluggy's order.

        Yields:
            Each plugin whose result is not None, and the result.

        Raises:
            PluginHookFailed: a plugin's function fails.
        """
        by_key = {plugin.key: plugin for plugin in self.plugins if plugin.state == "ok"}
        for implementation in self.manager.implementations(hook):
            value = self.manager.call(hook, implementation, arguments)
            if value is not None:
                yield by_key[implementation.plugin_name], value

    def fingerprint(self) -> str:
        """Digest of the usable plugins and their files, equal on every rank that may train together."""
        from nxdt_core.kernel.lock import digest_lines

        return digest_lines(sorted(f"{name} {identity}" for name, identity in self.identities().items()))

    def identities(self) -> Mapping[str, str]:
        """Return distribution, version and digest of the files of each usable plugin, by its name."""
        if self._identities is None:
            from nxdt_core.kernel.lock import digest_plugin

            self._identities = {
                plugin.name: f"{plugin.dist} {plugin.version or '-'} {digest_plugin(plugin)}"
                for plugin in self.plugins
                if plugin.state == "ok"
            }
        return self._identities

    def unmatched_policy(self) -> tuple[str, ...]:
        """Return the entries of the policy that name no plugin that was found: often misspelt, so worth a warning."""
        entries = (*(self.policy.allow or ()), *self.policy.block, *self.policy.prefer)
        return tuple(
            entry
            for entry in entries
            if not any(names(entry, name=plugin.name, dist=plugin.dist) for plugin in self.plugins)
        )


@dataclass(slots=True)
class Candidate:
    """A plugin on its way from found to registered, with what is known of it so far."""

    plugin: PluginInfo
    loaded: object = None
    """Object that the entry point names."""
    kinds: dict[str, Kind] = field(default_factory=dict)
    """Kinds that the plugin adds, by name."""
    components: list[RegisteredComponent] = field(default_factory=list)
    """Components of the kernel's own kinds."""
    offers: list[Mapping[str, Any]] = field(default_factory=list)
    """Records by name of a kind that some plugin adds; unchecked, since that plugin may come later."""
    added: list[RegisteredComponent] = field(default_factory=list)
    """The records of ``offers``, once they are checked."""

    def attempt(self, step: Callable[..., None], *arguments: object) -> bool:
        """Take a step, unless the plugin cannot be used; one that fails is broken. Return whether it did not fail."""
        if self.plugin.state == "ok":
            try:
                step(*arguments)
            except PluginDefect as defect:
                self.plugin = replace(self.plugin, state="broken", reason=str(defect))
                return False
        return True

    def load(self, strict: bool, owners: dict[int, str]) -> None:
        """Import the entry module, and note it in ``owners`` of objects by their identity."""
        begun = perf_counter()
        self.loaded, note = import_plugin(self.plugin, strict=strict)
        self.plugin = replace(self.plugin, note=note, import_s=perf_counter() - begun)
        owner = owners.setdefault(id(self.loaded), self.plugin.label)
        if owner != self.plugin.label:  # pluggy has an object once
            raise PluginDefect(f"{self.plugin.module} is the module of {owner}, too")

    def register(self, manager: HookManager, by_key: dict[str, Candidate]) -> None:
        """Register what the entry point names with pluggy, which checks its hook functions, and itself in ``by_key``
        of candidates by pluggy's names of them."""
        try:
            manager.register(self.loaded, name=self.plugin.key)
        except PluginDefect:
            raise
        except Exception as error:  # of the plugin's __dir__, or of pluggy's checks
            raise PluginDefect(f"registering it {describe_failure(error)}") from error
        by_key[self.plugin.key] = self
        if not manager.get_hookcallers(self.loaded):
            hint = "its entry module implements no hook, so that it offers nothing"
            self.plugin = replace(self.plugin, hints=(*self.plugin.hints, hint))

    def take(
        self, manager: HookManager, hook: str, implementation: pluggy.HookImpl, adders: dict[str, PluginInfo]
    ) -> None:
        """Call a registration hook and check what it gives; ``adders`` has the plugin that adds a kind, by its name."""
        try:
            value = manager.call(hook, implementation, {})
        except PluginHookFailed as error:
            raise PluginDefect(f"{hook} {error.reason}") from error
        except NxdtError as error:
            raise PluginDefect(f"{hook}: {error.what()}") from error
        if value is None:
            return
        if hook == "nxdt_components":
            if not isinstance(value, Mapping):
                raise PluginDefect(f"{hook} returns {type(value).__name__}, not a mapping by kind")
            self.offers.append(value)
            return
        records = _items(hook, value, _RECORDS[hook])
        if hook == "nxdt_kinds":
            for kind in records:
                if kind.name in _OWN:
                    raise PluginDefect(f"nxdt_kinds adds {kind.name!r}, which the kernel defines")
                if not (isinstance(kind.record, type) and issubclass(kind.record, Component)):
                    reason = f"whose record {kind.record!r} is not a Component class"
                    raise PluginDefect(f"nxdt_kinds adds {kind.name!r} {reason}")
                first = adders.setdefault(kind.name, self.plugin)
                if first.key != self.plugin.key:
                    raise PluginDefect(f"nxdt_kinds adds {kind.name!r}, which {first.label} adds")
                self.kinds[kind.name] = kind
        elif hook != "nxdt_cli":  # commands are checked now; the command line calls the hook again
            self.components += self._checked(_BY_HOOK[hook], records)
        if self.plugin.dist == LOCAL and records and hook in _BEFORE_CONFIG:
            note = f"only an installed plugin can offer a {_BEFORE_CONFIG[hook]}; `nxdt plugins new` writes one"
            self.plugin = replace(self.plugin, note="; ".join(filter(None, (self.plugin.note, note))))

    def fill_kinds(self, kinds: Mapping[str, Kind]) -> None:
        """Take the components for ``kinds`` that plugins add."""
        self.added = []
        for offer in self.offers:
            for name, records in offer.items():
                kind = kinds.get(name)
                if kind is None:
                    close = difflib.get_close_matches(str(name), kinds, n=1)
                    hint = f"; did you mean {close[0]!r}?" if close else ""
                    raise PluginDefect(f"nxdt_components fills the kind {name!r}, which no plugin adds{hint}")
                if kind is _OWN.get(name):
                    raise PluginDefect(f"nxdt_components fills the kind {name!r}, which {kind.hook} fills")
                self.added += self._checked(kind, _items("nxdt_components", records, kind.record))

    def _checked(self, kind: Kind, records: Iterable[Component]) -> Iterator[RegisteredComponent]:
        """Check names, which may not mean two components of one plugin, and capabilities, of which one with a wrong
        name would have no effect; between plugins the registry decides."""
        seen: set[str] = set()
        for record in records:
            for name in (record.name, *record.aliases):
                if name in seen:
                    raise PluginDefect(f"it offers the {kind.name} {name!r} twice")
                seen.add(name)
            required = record.requires_of_model if isinstance(record, AdapterComponent) else frozenset()
            for verb, capabilities, known in (
                ("declares", record.capabilities, kind.capabilities),
                ("requires", record.requires, CAPABILITIES["engine"]),
                ("requires of the model", required, CAPABILITIES["model"]),
            ):
                if not capabilities <= known.keys():
                    name = min(capabilities - known.keys())
                    reason = f"the {kind.name} {record.name!r} {verb} the capability {name!r}"
                    if not known:
                        raise PluginDefect(f"{reason}; components of its kind have none")
                    close = difflib.get_close_matches(name, known, n=3)
                    hint = f"did you mean {one_of(close)}?" if close else f"known are {listing(sorted(known), 40)}"
                    raise PluginDefect(f"{reason}, which does not exist; {hint}")
            yield RegisteredComponent(
                kind=kind.name,
                record=record,
                config=record.config or kind.config,
                plugin=self.plugin.name,
                dist=self.plugin.dist,
                version=self.plugin.version,
            )
