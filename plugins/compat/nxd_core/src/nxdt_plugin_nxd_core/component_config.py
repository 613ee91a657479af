"""The section ``model`` of a module that a program builds. No torch here."""

from __future__ import annotations

from nxdt_core.config.section import Section

__all__ = ["ModuleConfig"]


class ModuleConfig(Section):
    """Nothing is configured: the program's ``model_fn`` builds the module."""
