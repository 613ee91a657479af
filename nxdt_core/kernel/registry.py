"""Finds components by kind and name, and advises which distribution to install where none is found.

Looking up imports nothing; :meth:`RegisteredComponent.load_target` does. ``first_party.json`` lists what the plugins of
this repository offer; ``make offers`` writes it from their entry modules. Plugins of third parties are not in it."""

from __future__ import annotations

import difflib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from nxdt_core.api import Component, EngineComponent, Kind
from nxdt_core.errors.plugins import (
    AmbiguousComponent,
    ComponentUnusable,
    SchemeNotAllowed,
    UnknownComponent,
    UnknownKind,
    UnknownScheme,
)
from nxdt_core.kernel.discovery import import_reference
from nxdt_core.kernel.plugin import PluginDefect, PluginInfo, PluginPolicy, diagnose, names, normalise

T = TypeVar("T")

_FILE: Final = Path(__file__).with_name("first_party.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredComponent:
    """One record of one plugin. Nothing of its implementation is imported until :meth:`load_target`."""

    kind: str
    record: Component
    config: str | None
    """Reference to the class of its section."""
    plugin: str
    dist: str
    version: str

    @property
    def qualified_name(self) -> str:
        """``plugin:name``, which is never ambiguous between distributions' entry points of different names."""
        return f"{self.plugin}:{self.record.name}"

    def load_target(self) -> Any:
        """Import the implementation that the record names.

        Raises:
            ComponentUnusable: its module is missing, raises, or lacks the attribute.
        """
        return self._load("target", self.record.target)

    def load_class(self, base: type[T]) -> type[T]:
        """Import the class that the record names, which inherits from the base class of its kind: that has the
        defaults of what is optional.

        Raises:
            ComponentUnusable: as :meth:`load_target`; or it does not inherit from ``base``, or lacks a method of it.
        """
        loaded, name = self.load_target(), f"{base.__module__}.{base.__qualname__}"
        if not (isinstance(loaded, type) and issubclass(loaded, base)):
            raise self.unusable("target", f"it does not inherit from {name}")
        if missing := sorted(getattr(loaded, "__abstractmethods__", ())):
            raise self.unusable("target", f"it lacks {', '.join(missing)} of {name}")
        return loaded

    def load_config(self) -> type | None:
        """Import the class of the component's section, or None where it has none.

        Raises:
            ComponentUnusable: as :meth:`load_target`, or what the record names is not a pydantic model.
        """
        if self.config is None:
            return None
        loaded = self._load("config", self.config)
        if not (isinstance(loaded, type) and hasattr(loaded, "__pydantic_fields__")):
            raise self.unusable("config", "it is not a pydantic model")
        return loaded

    def load_rules(self) -> Callable[[Any], Iterable[Any]] | None:
        """Import an engine's rules of layouts (:data:`nxdt_core.protocols.engine.EngineRules`); None where its
        record names none.

        Raises:
            ComponentUnusable: as :meth:`load_target`, or what the record names cannot be called.
        """
        if not isinstance(self.record, EngineComponent) or self.record.rules is None:
            return None
        rules: Callable[[Any], Iterable[Any]] = self._load("rules", self.record.rules)
        if not callable(rules):
            raise self.unusable("rules", "it is not a function")
        return rules

    def _load(self, field: str, reference: str) -> Any:
        try:
            return import_reference(reference)
        except PluginDefect as defect:
            raise self.unusable(field, str(defect)) from defect.__cause__

    def unusable(self, field: str, reason: str) -> ComponentUnusable:
        """Return the error about what ``field`` of the record names: ``target``, ``config`` or ``rules``."""
        return ComponentUnusable(
            kind=self.kind,
            name=self.record.name,
            dist=self.dist,
            field=field,
            reference=str(self.config if field == "config" else getattr(self.record, field)),
            reason=reason,
        )


class Registry:
    """The components of all usable plugins; the same, in the same order, on every rank.

    Example::

        builder = kernel.registry.get("model", "llama").load_target()
    """

    def __init__(
        self,
        *,
        kinds: Sequence[Kind],
        components: Iterable[RegisteredComponent],
        plugins: Sequence[PluginInfo],
        policy: PluginPolicy,
    ) -> None:
        self._kinds = {kind.name: kind for kind in kinds}
        self._plugins, self._policy = plugins, policy
        self._components = defaultdict[str, list[RegisteredComponent]](list)
        for component in sorted(components, key=lambda c: (c.record.name, normalise(c.dist), c.plugin)):
            self._components[component.kind].append(component)

    def kinds(self) -> tuple[Kind, ...]:
        """Return the kernel's kinds in their order, then those that plugins add."""
        return tuple(self._kinds.values())

    def kind(self, name: str) -> Kind:
        """Return the kind of that name.

        Raises:
            UnknownKind: there is none.
        """
        if name not in self._kinds:
            raise UnknownKind(kind=name, close=_close(name, self._kinds), available=tuple(self._kinds))
        return self._kinds[name]

    def names(self, kind: str) -> tuple[str, ...]:
        """Return the names that a configuration may write for ``kind``, sorted, without aliases.

        Raises:
            UnknownKind: there is no such kind.
        """
        return tuple(dict.fromkeys(component.record.name for component in self.all(kind)))

    def all(self, kind: str) -> tuple[RegisteredComponent, ...]:
        """Return all components of ``kind``, sorted by name and distribution.

        Raises:
            UnknownKind: there is no such kind.
        """
        return tuple(self._components[self.kind(kind).name])

    def get(self, kind: str, name: str) -> RegisteredComponent:
        """Return the component that ``name`` means: a name, an alias, or either as ``plugin:name``.

        Raises:
            UnknownKind: there is no such kind.
            UnknownComponent: no plugin offers it; the error says what was close and what is installed but unusable.
            AmbiguousComponent: several plugins offer it and ``plugins.prefer`` names none of them.
        """
        plugin, _, short = name.rpartition(":")
        offers = [
            component
            for component in self.all(kind)
            if short in (component.record.name, *component.record.aliases)
            and (not plugin or names(plugin, name=component.plugin, dist=component.dist))
        ]
        if offers:
            return self.choose(kind, name, offers)
        components = self.all(kind)
        install, unusable = self._advice(offering_dist(kind, short))
        spellings = [text for c in components for text in (c.record.name, *c.record.aliases)]
        qualified = [c.qualified_name for c in components] if ":" in name else []
        meant = tuple(c.record.name for c in components if name.lower() in c.record.suggested_for)
        raise UnknownComponent(
            kind=kind,
            name=name,
            section=self.kind(kind).section,
            close=meant or _close(name, qualified) or _close(short, spellings),
            available=self.names(kind),
            unusable=unusable,
            install=install,
        )

    def storage_for_scheme(self, scheme: str) -> RegisteredComponent:
        """Return the store that serves ``scheme://`` locations (``s3``, without ``://``).

        Raises:
            SchemeNotAllowed: ``plugins.schemes`` does not name it.
            UnknownScheme: no plugin serves it.
            AmbiguousComponent: several plugins do and ``plugins.prefer`` names none of them.
        """
        self.check_scheme(scheme)
        stores = [(component, getattr(component.record, "uri_schemes", ())) for component in self.all("store")]
        offers = [component for component, schemes in stores if scheme.lower() in schemes]
        if offers:
            return self.choose("store", scheme, offers)
        install, unusable = self._advice(
            next((offer["dist"] for offer in _offers() if scheme.lower() in offer.get("uri_schemes", ())), None)
        )
        available = tuple(sorted({served for _, schemes in stores for served in schemes}))
        raise UnknownScheme(scheme=scheme, available=available, unusable=unusable, install=install)

    def check_scheme(self, scheme: str) -> None:
        """Check that ``plugins.schemes`` allows addresses of ``scheme``.

        Raises:
            SchemeNotAllowed: it does not.
        """
        schemes = self._policy.schemes
        if schemes is not None and scheme.lower() not in (allowed := tuple(map(str.lower, schemes))):
            raise SchemeNotAllowed(scheme=scheme, allowed=allowed)

    def readers(self, architectures: Sequence[str]) -> tuple[RegisteredComponent, ...]:
        """Model builders that read a Hugging Face ``config.json`` with one of these ``architectures``: those that name
        it, and where there are none those with a pattern of it."""
        models = [(component, getattr(component.record, "hf_architectures", ())) for component in self.all("model")]
        return _reading(architectures, models)

    def reading_dists(self, architectures: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
        """Return where :meth:`readers` gives none: the distribution to install, and a sentence for each installed
        plugin that cannot be used and might have read one."""
        model = next(filter(None, map(reading_model, architectures)), None)
        return self._advice(None if model is None else offering_dist("model", model))

    def not_offered(self, kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return advice for a missing component of ``kind``: ``pip install DIST (names)`` for each distribution that is
        known to offer some but is not installed, and a sentence for each that is installed but unusable."""
        offered: dict[str, list[str]] = {}
        for offer in _offers():
            if offer["kind"] == kind:
                offered.setdefault(offer["dist"], []).append(offer["name"])
        missing = (
            f"pip install {dist} ({', '.join(names)})"
            for dist, names in offered.items()
            if _uninstalled(dist, self._plugins)
        )
        unusable = (diagnose(p) for p in self._plugins if p.state != "ok" and normalise(p.dist) in offered)
        return tuple(missing), tuple(unusable)

    def choose(self, kind: str, name: str, offers: Sequence[RegisteredComponent]) -> RegisteredComponent:
        """Return the only one of ``offers``, or the one whose plugin comes first in ``plugins.prefer``.

        Args:
            kind: Kind of the offers.
            name: The requested name, for the error.
            offers: At least one.

        Raises:
            AmbiguousComponent: there are several, and ``plugins.prefer`` names none of their plugins.
        """
        if len(offers) == 1:
            return offers[0]
        for entry in self._policy.prefer:
            preferred = [offer for offer in offers if names(entry, name=offer.plugin, dist=offer.dist)]
            if len(preferred) == 1:
                return preferred[0]
        distinct = len({offer.plugin for offer in offers}) == len(offers)
        raise AmbiguousComponent(
            kind=kind,
            name=name,
            offers=tuple(f"{o.plugin if distinct else o.dist}:{o.record.name}" for o in offers),
            dists=tuple(f"{o.dist} {o.version}" for o in offers),
        )

    def _advice(self, dist: str | None) -> tuple[str | None, tuple[str, ...]]:
        """Return ``dist``, which offers what is sought, unless it is installed; and a sentence for each installed
        plugin that cannot be used and might have offered it: those of ``dist`` where it is known."""
        usable = {normalise(plugin.dist) for plugin in self._plugins if plugin.state == "ok"}
        bad = [p for p in self._plugins if p.state != "ok" and normalise(p.dist) not in usable]
        meant = [plugin for plugin in bad if normalise(plugin.dist) == dist]
        return _uninstalled(dist, self._plugins), tuple(map(diagnose, meant or bad))


def _close(name: str, candidates: Iterable[str]) -> tuple[str, ...]:
    """Candidates that are spelt like ``name``, nearest first; case does not count."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    return tuple(by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3))


@cache
def _offers() -> list[dict[str, Any]]:
    """Return a row for each component of each distribution, with fields of its record; recipes of one share a row."""
    rows: list[dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
    return rows


def offering_dist(kind: str, name: str) -> str | None:
    """Return the distribution that offers the component, in any spelling of its name (``SFT_Chat``, ``Mixtral``)."""
    for offer in _offers():
        spellings = map(normalise, (offer["name"], *offer.get("aliases", ())))
        if offer["kind"] == kind and normalise(name) in spellings:
            return str(offer["dist"])
    return None


def missing_dist(kind: str, name: str, plugins: Iterable[PluginInfo]) -> str | None:
    """Return the distribution that offers ``name``, unless it is that of an installed plugin, in any state.

    Args:
        kind: of a component; ``recipe`` or ``command`` for what a distribution brings without one.
        name: of a component or a recipe, or the words of a command: ``checkpoint export-lora``.
        plugins: all that are installed.
    """
    return _uninstalled(offering_dist(kind, name), plugins)


def _uninstalled(dist: str | None, plugins: Iterable[PluginInfo]) -> str | None:
    return None if dist is None or any(normalise(plugin.dist) == dist for plugin in plugins) else dist


def reading_model(architecture: str) -> str | None:
    """Return the name of the model that is built from a Hugging Face ``config.json`` with that architecture.

    A model that names the architecture comes before one that has a pattern of it.
    """
    models = [(offer["name"], offer.get("hf_architectures", ())) for offer in _offers()]
    return next(iter(_reading([architecture], models)), None)


def _reading(architectures: Sequence[str], models: Sequence[tuple[T, Sequence[str]]]) -> tuple[T, ...]:
    """Return the models that name one of the architectures, and where there are none those with a pattern of one."""
    exact = tuple(model for model, read in models if not set(read).isdisjoint(architectures))
    return exact or tuple(
        model for model, read in models if any(fnmatchcase(name, pattern) for name in architectures for pattern in read)
    )


def showing_migrations() -> tuple[str, ...]:
    """Return the keys that show that a configuration is of a program which one of our plugins migrates."""
    return tuple(key for offer in _offers() for key in offer.get("shown_by", ()))
