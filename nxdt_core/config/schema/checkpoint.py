"""Section ``checkpoint``: all of saving and resuming. The docstrings are the YAML reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from nxdt_core.config.marks import NoEffect, PositiveInt, Range

__all__ = ["CheckpointConfig", "StorageSection"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSection:
    """The store of the checkpoints; its keys stand beside ``name``."""

    name: str | None = None
    """Component of kind ``checkpoint_storage``; ``null`` takes the one that serves the scheme of ``checkpoint.uri``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved, where, which are kept, and what a run starts from."""

    enabled: bool = True
    """Save at all."""
    uri: str | None = None
    """Where checkpoints lie: a path or ``scheme://…``; ``null`` means ``<run directory>/checkpoints``."""
    every_n_train_steps: PositiveInt | None = None
    """Optimizer steps between two checkpoints; ``null`` saves at the end of the run only."""
    save_last: bool = True
    """Save at the end of the run too. (A run that is told to stop always saves.)"""
    save_top_k: Annotated[int, Range(-1)] = 3
    """Checkpoints that are kept, best first by ``monitor``; -1 keeps all, 0 none but the last."""
    keep_last: PositiveInt | None = None
    """Newest checkpoints that are kept whatever ``monitor`` says."""
    monitor: str = "step"
    """Metric that ranks checkpoints; ``step`` keeps the newest."""
    mode: Literal["min", "max"] = "max"
    """Whether a small or a large metric is good."""
    async_save: bool = False
    """Go on training while a checkpoint is written."""
    resume_if_exists: bool = False
    """Go on from the newest good checkpoint at ``uri``."""
    resume_ignore_no_checkpoint: bool = False
    """With ``resume_if_exists``: start afresh where there is none, instead of an error."""
    resume_past_end: Annotated[bool, NoEffect("a run that has reached trainer.max_steps says so and ends")] = False
    """Resume a run that has reached ``trainer.max_steps``."""
    resume_from: str | None = None
    """One checkpoint to start from: its directory or URI."""
    weight_init_only: bool = False
    """Take only the weights from ``resume_from``: optimizer, step and data start afresh."""
    storage: StorageSection = field(default_factory=StorageSection)
    """The store."""
