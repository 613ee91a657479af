"""Keys of the built-in loggers. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["MLFlowConfig", "WandbConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig:
    """Weights & Biases. Each start of the training creates its own W&B run, unless ``id`` names one.

    Without a network: ``offline: true`` or ``WANDB_MODE=offline``, and ``wandb sync`` later.
    """

    project: str | None = None
    """Project; ``null`` takes ``WANDB_PROJECT``, else ``lightning_logs``."""
    name: str | None = None
    """Name of the run; ``null`` takes the name of the run's directory."""
    entity: str | None = None
    """User or team; ``null`` takes the default of the account."""
    id: str | None = None
    """Id of the run to resume, or of a new one; 64 characters, unique in the project."""
    group: str | None = None
    """Group of runs."""
    job_type: str | None = None
    """Kind of run within a group."""
    tags: tuple[str, ...] | None = None
    """Labels."""
    notes: str | None = None
    """A longer description."""
    offline: bool = False
    """Write files only."""
    prefix: str = ""
    """Text before the names of metrics."""
    resume: Literal["allow", "never", "must"] | None = "allow"
    """How to handle an ``id`` that already exists: see ``wandb.init``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MLFlowConfig:
    """MLflow. Each start of the training creates its own MLflow run, unless ``run_id`` names one."""

    experiment_name: str = "lightning_logs"
    """Experiment; created if it does not exist."""
    run_name: str | None = None
    """Name of the run; ``null`` takes the name of the run's directory."""
    tracking_uri: str | None = None
    """Server or store (``http://…``, ``sqlite:///…``, ``file:…``); ``null`` takes ``MLFLOW_TRACKING_URI``, else
    ``mlflow.db`` in the run's directory."""
    run_id: str | None = None
    """Id of the run to resume."""
    tags: Mapping[str, str] | None = None
    """Labels."""
    prefix: str = ""
    """Text before the names of metrics."""
    artifact_location: str | None = None
    """Where a new experiment keeps files; ``null`` leaves it to the server or store."""
