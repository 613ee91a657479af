"""Arguments of hooks: one frozen object per event, so that fields can grow without breaking a plugin.

A plugin annotates with them under ``if TYPE_CHECKING:``. All values are plain data: no tensor, no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "CheckpointContext",
    "ConfigDefaultsContext",
    "ConfigureContext",
    "FitContext",
    "ResolveModelContext",
    "ResolveStorageContext",
    "StepContext",
    "ValidateConfigContext",
]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigureContext:
    """The configuration is valid and final; the run is about to build its parts on this process."""

    config: Mapping[str, Any]
    """The resolved configuration as a nested plain tree that may be written: what comes from the environment is its
    reference, and secrets are masked. Components get the values through their own dataclass."""
    components: Mapping[str, str]
    run_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveModelContext:
    """A configuration that names no model builder by itself."""

    model: Mapping[str, Any]
    """The section ``model``."""
    hf_architectures: tuple[str, ...] = ()
    """``architectures`` of the Hugging Face ``config.json`` that the section points at, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveStorageContext:
    """A checkpoint location, before its scheme is looked up."""

    uri: str
    """``checkpoint.uri`` as written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitContext:
    """A training run begins or ends on this process."""

    run_dir: Path
    rank: int
    world_size: int
    step: int
    """Optimizer steps done: at the start those of the checkpoint resumed from, else 0."""
    max_steps: int
    status: Literal["running", "finished", "stopped", "failed"] = "running"
    """``stopped``: by a signal or a time limit, cleanly at a step boundary."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """As :attr:`ConfigureContext.config`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """One optimizer step is done."""

    step: int
    """Counted from 1."""
    consumed_samples: int
    consumed_tokens: int
    metrics: Mapping[str, float]
    """What this step logs (``loss``, ``grad_norm``, ``lr``, …); empty between logging steps, when nothing
    leaves the device."""
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContext:
    """A checkpoint is committed, or was loaded."""

    step: int
    uri: str
    """``<checkpoint.uri>/step-00000100``."""
    size_bytes: int
    consumed_samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    rank: int = 0
