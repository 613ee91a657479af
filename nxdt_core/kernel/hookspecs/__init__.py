"""The hooks, one module a phase. Each function is a specification: its signature, meaning and an example.

Specifications import nothing heavy. An implementation has the same name, is marked with
:data:`nxdt_core.api.hookimpl`, takes the argument ``context`` or none, and gives it no default.
"""

from __future__ import annotations

from types import ModuleType

from nxdt_core.kernel.hookspecs import configuration, registration

__all__ = ["PHASES"]

PHASES: tuple[ModuleType, ...] = (registration, configuration)
"""Modules of specifications, in the order in which a run meets them."""
