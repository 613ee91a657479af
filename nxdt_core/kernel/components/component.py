"""A component in the registry: its record, its plugin, and its implementation on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from typing import Any

from nxdt_core.api import Component
from nxdt_core.errors.plugins import ComponentUnusable
from nxdt_core.kernel.defect import PluginDefect
from nxdt_core.kernel.discovery.loading import import_reference

__all__ = ["RegisteredComponent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredComponent:
    """One record of one plugin. Nothing of its implementation is imported until :meth:`load_target`."""

    kind: str
    record: Component
    config: str | None
    """Reference to the dataclass of its section."""
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

    def load_config(self) -> type | None:
        """Import the dataclass of the component's section, or None where it has none.

        Raises:
            ComponentUnusable: as :meth:`load_target`, or what the record names is not a dataclass.
        """
        if self.config is None:
            return None
        loaded = self._load("config", self.config)
        if not (isinstance(loaded, type) and is_dataclass(loaded)):
            raise self._unusable("config", self.config, "it is not a dataclass")
        return loaded

    def load_rules(self) -> Callable[[Any], Iterable[Any]] | None:
        """Import an engine's rules of layouts (:class:`nxdt_core.protocols.parallel.rules.EngineRules`); None where its
        record names none.

        Raises:
            ComponentUnusable: as :meth:`load_target`, or what the record names cannot be called.
        """
        reference = getattr(self.record, "rules", None)
        if reference is None:
            return None
        loaded = self._load("rules", reference)
        if not callable(loaded):
            raise self._unusable("rules", reference, "it is not a function")
        found: Callable[[Any], Iterable[Any]] = loaded
        return found

    def _load(self, field: str, reference: str) -> Any:
        try:
            return import_reference(reference)
        except PluginDefect as defect:
            raise self._unusable(field, reference, str(defect)) from defect.__cause__

    def _unusable(self, field: str, reference: str, reason: str) -> ComponentUnusable:
        return ComponentUnusable(
            kind=self.kind,
            name=self.record.name,
            plugin=self.plugin,
            dist=self.dist,
            field=field,
            reference=reference,
            reason=reason,
        )
