"""Calls one plugin's registration hooks and checks what they yield, all or nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pluggy

from nxdt_core.api import CAPABILITIES, KINDS, AdapterComponent, CliCommand, Component, Kind
from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import listing, one_of
from nxdt_core.errors.plugins import PluginHookFailed
from nxdt_core.kernel.plugin import GUARDED, PluginDefect, PluginInfo, describe_failure
from nxdt_core.kernel.registry import RegisteredComponent

__all__ = ["Declaration", "declare", "fill_added_kinds"]

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
