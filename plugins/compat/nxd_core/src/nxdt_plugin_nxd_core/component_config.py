"""The section ``model`` of a module that a program builds. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ModuleConfig"]


@dataclass(kw_only=True)
class ModuleConfig:
    """Nothing is configured: the program's ``model_fn`` builds the module."""
