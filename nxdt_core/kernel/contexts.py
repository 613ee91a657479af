"""Arguments of hooks: one frozen object per hook, so that fields can grow without breaking a plugin.

A plugin annotates with them under ``if TYPE_CHECKING:``. All values are plain data: no tensor, no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ConfigDefaultsContext", "ValidateConfigContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDefaultsContext:
    """Before defaults are merged."""

    config: Mapping[str, Any]
    """What the user wrote, overrides included; a nested plain tree. Do not change it."""
    source: str
    """Path of the file, or ``recipe:NAME``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateConfigContext:
    """After types and keys are checked, before anything is built."""

    config: Mapping[str, Any]
    """The resolved configuration as a nested plain tree, with all values. It may hold secrets: do not write it."""
    components: Mapping[str, str]
    """``plugin:name`` of the selected component by slot (``model``, ``data``, ``optimizer``, …)."""
