"""Starts the kernel: finds plugins, imports their light modules, asks what they offer, and registers it.

What a plugin's registration hooks yield is checked, and taken as a whole or not at all. Digests are imported where they
are asked for: every command starts a kernel, few compare files.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar, final

import pluggy

from nxdt_core import __version__
from nxdt_core.api import CAPABILITIES, KINDS, AdapterComponent, CliCommand, Component, Kind
from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import listing, one_of
from nxdt_core.errors.plugins import PluginHookFailed, PluginsUnusable
from nxdt_core.kernel import hooks as hooks_of_plugins
from nxdt_core.kernel.discovery import find_local_plugins, find_plugins, import_plugin
from nxdt_core.kernel.hooks import HookSet, collect_hooks
from nxdt_core.kernel.plugin import (
    BUILTIN,
    GUARDED,
    PluginDefect,
    PluginInfo,
    PluginPolicy,
    advise,
    describe_failure,
    diagnose,
    names,
)
from nxdt_core.kernel.registry import RegisteredComponent, Registry

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What one plugin offers."""

    plugin: PluginInfo
    kinds: tuple[Kind, ...]
    components: tuple[RegisteredComponent, ...]
    """Of the kernel's own kinds."""
    added: Mapping[str, tuple[Any, ...]]
    """Records by name of a kind that some plugin adds; unchecked, since that plugin may come later."""


def declare(plugin: PluginInfo, hooks: pluggy.HookRelay) -> Declaration:
    """Call the registration hooks of one plugin.

    Args:
        plugin: Whose hooks.
        hooks: Pluggy's, with this plugin registered alone.

    Raises:
        PluginDefect: a hook fails, or yields what its kind does not take.
    """
    kinds = _yielded(hooks, "nxdt_kinds", Kind)
    for kind in kinds:
        if any(kind.name == own.name for own in KINDS):
            raise PluginDefect(f"nxdt_kinds adds {kind.name!r}, which the kernel defines")
        if not (isinstance(kind.record, type) and issubclass(kind.record, Component)):
            raise PluginDefect(f"nxdt_kinds adds {kind.name!r} whose record {kind.record!r} is not a Component class")
    components = [
        _registered(plugin, kind, record) for kind in KINDS for record in _yielded(hooks, kind.hook, kind.record)
    ]
    _refuse_duplicates(components)
    _yielded(hooks, "nxdt_cli", CliCommand)  # checked now; the command line calls it again
    return Declaration(plugin=plugin, kinds=kinds, components=tuple(components), added=_added(hooks))


def fill_added_kinds(declaration: Declaration, kinds: Mapping[str, Kind]) -> tuple[RegisteredComponent, ...]:
    """Return the components for kinds that plugins add, checked against those kinds.

    Raises:
        PluginDefect: no plugin adds the kind, or a record is not of the kind's class.
    """
    components = []
    for name, records in declaration.added.items():
        kind = kinds.get(name)
        if kind is None:
            close = difflib.get_close_matches(str(name), kinds, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise PluginDefect(f"nxdt_components fills the kind {name!r}, which no plugin adds{hint}")
        if any(kind is own for own in KINDS):
            raise PluginDefect(f"nxdt_components fills the kind {name!r}, which {kind.hook} fills")
        for record in records:
            _require("nxdt_components", record, kind.record)
            components.append(_registered(declaration.plugin, kind, record))
    _refuse_duplicates(components)
    return tuple(components)


def _yielded(hooks: pluggy.HookRelay, hook: str, record: type[T]) -> tuple[T, ...]:
    """What one registration hook gives, each of the class ``record``."""
    with _defects_of(hook):
        records = [record for value in _values(hooks, hook) for record in _items(hook, value)]
    for found in records:
        _require(hook, found, record)
    return tuple(records)


def _values(hooks: pluggy.HookRelay, hook: str) -> list[Any]:
    caller = getattr(hooks, hook)
    return [result.value for result in caller()] if caller.get_hookimpls() else []  # most plugins implement one hook


def _added(hooks: pluggy.HookRelay) -> dict[str, tuple[Any, ...]]:
    added: dict[str, tuple[Any, ...]] = {}
    with _defects_of("nxdt_components"):
        for value in _values(hooks, "nxdt_components"):
            if not isinstance(value, Mapping):
                raise PluginDefect(f"nxdt_components returns {type(value).__name__}, not a mapping by kind")
            for name, records in value.items():
                added[name] = (*added.get(name, ()), *_items("nxdt_components", records))
    return added


def _items(hook: str, value: object) -> Iterable[Any]:
    if not isinstance(value, Iterable) or isinstance(value, (str, Mapping)):
        raise PluginDefect(f"{hook} yields {type(value).__name__} where a list of records belongs")
    return value


@contextmanager
def _defects_of(hook: str) -> Iterator[None]:
    """Turn what a plugin's code raises into its defect. (A hook may be a generator, so iterating runs code too.)"""
    try:
        yield
    except PluginDefect:
        raise
    except PluginHookFailed as error:
        raise PluginDefect(f"{hook} {error.reason}") from error
    except NxdtError as error:
        raise PluginDefect(f"{hook}: {error.what()}") from error
    except GUARDED as error:
        raise PluginDefect(f"{hook} {describe_failure(error)}") from error


def _require(hook: str, found: object, record: type) -> None:
    if type(found) is not record:  # records of other kinds are subclasses, too
        raise PluginDefect(f"{hook} yields a {type(found).__name__}, not a {record.__name__}")


def _registered(plugin: PluginInfo, kind: Kind, record: Component) -> RegisteredComponent:
    _refuse_unknown("declares", kind, record, record.capabilities, kind.capabilities)
    _refuse_unknown("requires", kind, record, record.requires, CAPABILITIES["engine"])
    if isinstance(record, AdapterComponent):
        wanted, known = record.requires_of_model, CAPABILITIES["model"]
        _refuse_unknown("requires of the model", kind, record, wanted, known)
    return RegisteredComponent(
        kind=kind.name,
        record=record,
        config=record.config or kind.config,
        plugin=plugin.name,
        dist=plugin.dist,
        version=plugin.version,
    )


def _refuse_unknown(verb: str, kind: Kind, record: Component, names: Iterable[str], known: Mapping[str, str]) -> None:
    """Check the names of capabilities: one with a wrong name would have no effect."""
    for name in sorted(set(names) - known.keys()):
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {one_of(close)}?" if close else f"known are {listing(sorted(known), 40)}"
        raise PluginDefect(
            f"the {kind.name} {record.name!r} {verb} the capability {name!r}, which does not exist; {hint}"
            if known
            else f"the {kind.name} {record.name!r} {verb} the capability {name!r}; components of its kind have none"
        )


def _refuse_duplicates(components: Iterable[RegisteredComponent]) -> None:
    """Refuse a name that means two components of one plugin; between plugins the registry decides."""
    seen: set[tuple[str, str]] = set()
    for component in components:
        for name in (component.record.name, *component.record.aliases):
            if (component.kind, name) in seen:
                raise PluginDefect(f"it offers the {component.kind} {name!r} twice")
            seen.add((component.kind, name))


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
        from nxdt_core.kernel.lock import fingerprint

        return fingerprint(self.identities())

    def identities(self) -> Mapping[str, str]:
        """Return distribution, version and digest of the files of each usable plugin, by its name."""
        if self._identities is None:
            from nxdt_core.kernel.lock import identify_plugins

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

    def add_kinds(self, adders: dict[str, PluginInfo]) -> None:
        """Note in ``adders`` that this plugin adds its kinds; refuse one that another plugin adds."""
        for kind in self.declaration.kinds:
            first = adders.setdefault(kind.name, self.plugin)
            if first is not self.plugin:
                raise PluginDefect(f"nxdt_kinds adds {kind.name!r}, which {first.label} adds")

    def fill_kinds(self, kinds: Mapping[str, Kind]) -> None:
        """Take the components for ``kinds`` that plugins add."""
        self.added = fill_added_kinds(self.declaration, kinds)


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
        each.attempt(partial(each.add_kinds, adders))
    before: list[_Candidate] = []
    while before != (before := _usable(candidates)):
        kinds = {kind.name: kind for kind in KINDS} | _added_kinds(candidates)
        for each in before:
            each.attempt(partial(each.fill_kinds, kinds))


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
