"""Which sections select a component, of which kind, and by which key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nxdt_core.config.sources.node import join
from nxdt_core.kernel.registry import RegisteredComponent

__all__ = ["SLOTS", "Composition", "Slot"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one component. Its keys are in ``section``, next to the key that names it."""

    kind: str
    section: str
    selector: str = "name"

    @property
    def key(self) -> str:
        """Path of the key that names the component."""
        return join(self.section, self.selector)


SLOTS: tuple[Slot, ...] = (
    Slot("model", "model"),
    Slot("dataset", "data"),
    Slot("tokenizer", "data.tokenizer", "library"),
    Slot("optimizer", "model.optim"),
    Slot("schedule", "model.optim.sched"),
    Slot("precision", "precision", "type"),
    Slot("store", "checkpoint.storage"),
    Slot("objective", "objective"),
    Slot("adapter", "adapter"),
    Slot("engine", "parallel_engine"),
)
"""In the order in which they are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """What the selected components add to the core's schema."""

    components: Mapping[str, RegisteredComponent | None] = field(default_factory=dict)
    """By kind; one whose component is unavailable is absent."""
    classes: Mapping[str, type] = field(default_factory=dict)
    """By path of the section: the class that the component declares."""
    open: frozenset[str] = frozenset()
    """Sections whose component is unknown, so that their keys are unknown too."""
    unfilled: frozenset[str] = frozenset()
    """Sections whose keys would have come from a file that cannot be read: missing keys are reported there."""

    def label(self, section: str) -> str:
        """Return a description of a section's component: ``model 'llama'``; empty where there is none."""
        slot = next((slot for slot in SLOTS if slot.section == section), None)
        component = self.components.get(slot.kind) if slot else None
        return f"{component.kind} {component.record.name!r}" if component else ""
