"""Starts the kernel: finds plugins, imports their light modules, asks what they offer, and registers it.

What a plugin's registration hooks yield is checked, and taken as a whole or not at all. Digests are imported where they
are asked for: every command starts a kernel, few compare files.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar, final

import pluggy

from nxdt_core import __version__
from nxdt_core.api import CAPABILITIES, KINDS, PROJECT, AdapterComponent, CliCommand, Component, Kind
from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import listing, one_of
from nxdt_core.errors.plugins import PluginHookFailed, PluginsUnusable
from nxdt_core.kernel import hookspecs
from nxdt_core.kernel.discovery import find_local_plugins, find_plugins, import_plugin
from nxdt_core.kernel.hooks import HookSet, collect_hooks
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

T = TypeVar("T")


_WITHOUT_RUN = {"launcher", "metric", "task"}
"""Kinds that commands look for before they read a configuration, which may name local plugins."""
_OWN = {kind.name: kind for kind in KINDS}
"""The kernel's own kinds by name."""


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
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginDefect(f"{hook} {describe_failure(error)}") from error


def _items(hook: str, value: object) -> Iterable[Any]:
    if not isinstance(value, Iterable) or isinstance(value, (str, Mapping)):
        raise PluginDefect(f"{hook} yields {type(value).__name__} where a list of records belongs")
    return value


def _require(hook: str, records: Iterable[object], record: type) -> None:
    for found in records:
        if type(found) is not record:  # records of other kinds are subclasses, too
            raise PluginDefect(f"{hook} yields a {type(found).__name__}, not a {record.__name__}")


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
        root = Path(__file__).parent.parent.parent
        # Named by text: they are on the level of plugins.
        own = PluginInfo(
            name=BUILTIN, dist="nxdt-core", version=__version__, module="nxdt_core.builtins", location=str(root)
        )
        found = [own, *find_plugins(policy, path), *find_local_plugins(policy)]
        if policy.lock is not None:
            from nxdt_core.kernel.lock import compare_with_lock

            compare_with_lock(found, policy.lock)
        candidates = [Candidate(plugin) for plugin in found]
        with redirect_stdout(sys.stderr):  # a module that prints must not spoil the output of --json
            for each in candidates:
                each.attempt(each.load, strict)
            for each in candidates:
                each.attempt(each.declare)
            kinds = _fill_added_kinds(candidates)
        plugins = tuple(each.plugin for each in candidates)
        if strict:
            _refuse_unusable(plugins)
        usable = [each for each in candidates if each.plugin.state == "ok"]
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(hookspecs)
        for each in reversed(usable):  # pluggy calls what was registered last first
            manager.register(each.hooks, name=f"{each.plugin.dist}:{each.plugin.name}")
        registry = Registry(
            kinds=tuple(kinds.values()),
            components=[component for each in usable for component in (*each.components, *each.added)],
            plugins=plugins,
            prefer=policy.prefer,
            schemes=policy.schemes,
        )
        return cls(plugins=plugins, registry=registry, hooks=manager.hook, policy=policy)

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


class Candidate:
    """A plugin on its way from found to registered, with what is known of it so far."""

    hooks: HookSet

    def __init__(self, plugin: PluginInfo) -> None:
        self.plugin = plugin
        self.kinds: list[Kind] = []
        """Those that it adds."""
        self.components: list[RegisteredComponent] = []
        """Of the kernel's own kinds."""
        self.offers: dict[str, list[Any]] = {}
        """Records by name of a kind that some plugin adds; unchecked, since that plugin may come later."""
        self.added: list[RegisteredComponent] = []
        """The same, once they are checked."""

    def attempt(self, step: Callable[..., None], *arguments: object) -> None:
        """Take a step, unless the plugin cannot be used; one that fails is broken."""
        if self.plugin.state == "ok":
            try:
                step(*arguments)
            except PluginDefect as defect:
                self.plugin = replace(self.plugin, state="broken", reason=str(defect))

    def load(self, strict: bool) -> None:
        """Import the entry module and check its hook functions."""
        begun = perf_counter()
        loaded, note = import_plugin(self.plugin, strict=strict)
        self.plugin = replace(self.plugin, note=note, import_s=perf_counter() - begun)
        self.hooks = collect_hooks(self.plugin, loaded)
        if not dir(self.hooks):
            hint = "its entry module implements no hook, so that it offers nothing"
            self.plugin = replace(self.plugin, hints=(*self.plugin.hints, hint))

    def declare(self) -> None:
        """Call the registration hooks, and check what they yield."""
        self.kinds = self._called("nxdt_kinds", Kind)
        for kind in self.kinds:
            if kind.name in _OWN:
                raise PluginDefect(f"nxdt_kinds adds {kind.name!r}, which the kernel defines")
            if not (isinstance(kind.record, type) and issubclass(kind.record, Component)):
                reason = f"whose record {kind.record!r} is not a Component class"
                raise PluginDefect(f"nxdt_kinds adds {kind.name!r} {reason}")
        for kind in KINDS:
            self.components += self._register(kind, self._called(kind.hook, kind.record))
        commands = self._called("nxdt_cli", CliCommand)  # checked now; the command line calls it again
        unseen = [*{each.kind for each in self.components} & _WITHOUT_RUN, *(["command"] if commands else [])]
        if self.plugin.dist == LOCAL and unseen:
            note = f"only an installed plugin can offer {listing(sorted(unseen))}; `nxdt plugins new` writes one"
            self.plugin = replace(self.plugin, note="; ".join(filter(None, (self.plugin.note, note))))
        with _defects_of("nxdt_components"):
            for value in self.hooks.call("nxdt_components"):
                if not isinstance(value, Mapping):
                    raise PluginDefect(f"nxdt_components returns {type(value).__name__}, not a mapping by kind")
                for name, records in value.items():
                    self.offers.setdefault(name, []).extend(_items("nxdt_components", records))

    def add_kinds(self, adders: dict[str, PluginInfo]) -> None:
        """Note in ``adders`` that this plugin adds its kinds; refuse one that another plugin adds."""
        for kind in self.kinds:
            first = adders.setdefault(kind.name, self.plugin)
            if first is not self.plugin:
                raise PluginDefect(f"nxdt_kinds adds {kind.name!r}, which {first.label} adds")

    def fill_kinds(self, kinds: Mapping[str, Kind]) -> None:
        """Take the components for ``kinds`` that plugins add."""
        self.added = []
        for name, records in self.offers.items():
            kind = kinds.get(name)
            if kind is None:
                close = difflib.get_close_matches(str(name), kinds, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise PluginDefect(f"nxdt_components fills the kind {name!r}, which no plugin adds{hint}")
            if kind is _OWN.get(name):
                raise PluginDefect(f"nxdt_components fills the kind {name!r}, which {kind.hook} fills")
            _require("nxdt_components", records, kind.record)
            self.added += self._register(kind, records)

    def _called(self, hook: str, record: type[T]) -> list[T]:
        """Return what one registration hook gives, each of the class ``record``."""
        records: list[T] = []
        if not self.hooks.implements(hook):  # most plugins have one hook or two of twenty
            return records
        with _defects_of(hook):
            for value in self.hooks.call(hook):
                records += _items(hook, value)
        _require(hook, records, record)
        return records

    def _register(self, kind: Kind, records: Iterable[Component]) -> Iterator[RegisteredComponent]:
        """Check names, which may not mean two components of one plugin, and capabilities; between plugins the registry
        decides."""
        seen: set[str] = set()
        for record in records:
            for name in (record.name, *record.aliases):
                if name in seen:
                    raise PluginDefect(f"it offers the {kind.name} {name!r} twice")
                seen.add(name)
            _refuse_unknown("declares", kind, record, record.capabilities, kind.capabilities)
            _refuse_unknown("requires", kind, record, record.requires, CAPABILITIES["engine"])
            if isinstance(record, AdapterComponent):
                wanted, known = record.requires_of_model, CAPABILITIES["model"]
                _refuse_unknown("requires of the model", kind, record, wanted, known)
            yield RegisteredComponent(
                kind=kind.name,
                record=record,
                config=record.config or kind.config,
                plugin=self.plugin.name,
                dist=self.plugin.dist,
                version=self.plugin.version,
            )


def _fill_added_kinds(candidates: Sequence[Candidate]) -> dict[str, Kind]:
    """Check the components of kinds that plugins add, and return all kinds by name. A plugin that fails takes its kinds
    with it, so that those that fill them are looked at again."""
    adders: dict[str, PluginInfo] = {}
    for each in candidates:
        each.attempt(each.add_kinds, adders)
    before = -1
    while before != (before := sum(each.plugin.state == "ok" for each in candidates)):
        usable = (each for each in candidates if each.plugin.state == "ok")
        kinds = _OWN | {kind.name: kind for each in usable for kind in each.kinds}
        for each in candidates:
            each.attempt(each.fill_kinds, kinds)
    return kinds


def _refuse_unusable(plugins: Sequence[PluginInfo]) -> None:
    problems = [f"{diagnose(p)} ({advise(p)})" for p in plugins if p.state not in ("ok", "blocked")]
    if problems:
        raise PluginsUnusable(problems=tuple(problems))
