"""Sections that do nothing but select a component. The docstrings are the YAML reference.

A bare name may stand for the section: ``parallel_engine: torch``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from nxdt_core.config.section import Section

__all__ = ["AdapterSection", "EngineSection", "ObjectiveSection", "PluginsConfig", "PrecisionSection"]


class PrecisionSection(Section):
    """Selects the dtypes of the run; the keys of the policy are next to ``type``."""

    type: str = "fp32"
    """Component of kind ``precision``. (NxD Training's default is ``mixed_precision``; here it is named in the
    file, since it changes results.)"""


class ObjectiveSection(Section):
    """Selects the loss; its keys are next to ``name``."""

    name: str = "causal_lm"
    """Component of kind ``objective``."""


class AdapterSection(Section):
    """Selects a change to the model; its keys are next to ``name``."""

    name: str | None = None
    """Component of kind ``adapter``; ``null`` for none."""


class EngineSection(Section):
    """Selects the runtime; its keys are next to ``name``."""

    name: str = "torch"
    """Component of kind ``engine``."""


class PluginsConfig(Section):
    """Which plugins a run may use. Entries are names of entry points or of distributions."""

    allow: tuple[str, ...] | None = None
    """Only these; ``null`` allows all that are installed."""
    block: tuple[str, ...] = ()
    """Never these; they are not even imported."""
    schemes: tuple[str, ...] | None = None
    """Schemes of addresses that checkpoints may be at, such as ``[file, s3]``; ``null`` allows those of all plugins."""
    prefer: tuple[str, ...] = ()
    """Order in which plugins win where two offer the same name."""
    local: tuple[Path, ...] = ()
    """Plugin files (``.py``) that are not installed."""
    lock: Path | None = None
    """Lock file that the installed plugins must agree with."""
    on_resume: Literal["warn", "refuse"] = "warn"
    """What a resume does where the plugin of the model or the optimizer has another version than the one that wrote the
    checkpoint."""
