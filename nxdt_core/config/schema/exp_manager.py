"""Section ``exp_manager``: where a run writes, what it logs. The docstrings are the YAML reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from nxdt_core.config.annotations import (
    DefaultsTo,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SourcePath,
)
from nxdt_core.config.schema.monitoring import MonitoringConfig
from nxdt_core.config.section import Section

__all__ = ["EarlyStoppingParams", "EmaConfig", "ExpManagerConfig"]


class EmaConfig(Section):
    """Exponential moving average of the weights, in float32: 4 bytes for each weight that a rank holds and trains.

    It is saved with the optimizer's state; ``nxdt checkpoint export --ema`` writes it.
    """

    enable: bool = False
    """Keep one."""
    decay: Fraction = 0.999
    """Share of the average that an update keeps; the rest comes from the weights."""
    apply_ema_every_n_steps: PositiveInt = 1
    """Optimizer steps between two updates."""
    start_step: NonNegativeInt = 0
    """No update before this step. The average begins as the weights after the first update."""
    evaluate_ema_weights_instead: bool = False
    """Validate the average instead of the weights."""


class EarlyStoppingParams(Section):
    """Early stopping: judged after each validation, with the same result on all ranks."""

    monitor: str = "val_loss"
    """Metric that is judged: ``val_loss``, or one of ``metrics.jsonl``."""
    mode: Literal["min", "max"] = "min"
    """Whether a small or a large one is good."""
    min_delta: NonNegativeFloat = 0.001
    """Smallest change that counts as an improvement."""
    patience: PositiveInt = 10
    """Validations in a row without an improvement that end the run."""
    check_finite: bool = True
    """Stop once the metric is infinite or not a number."""
    stopping_threshold: float | None = None
    """Stop once the metric is better than this."""
    divergence_threshold: float | None = None
    """Stop once the metric is worse than this."""
    strict: bool = True
    """A metric that is not logged is an error; with ``false`` the run then continues."""


class ExpManagerConfig(Section):
    """The run's directory, resuming, loggers."""

    exp_dir: str = "./nxdt_experiments"
    """Parent of the directories of runs."""
    name: Annotated[str, DefaultsTo("name")]
    """Directory of the run below ``exp_dir``; ``name`` of the top level where it is not set."""
    version: str | int | None = None
    """Directory below the run's name, for runs kept apart."""
    use_datetime_version: bool = False
    """Name that directory after the time of the start, where ``version`` is not set and the run does not resume."""
    explicit_log_dir: str | None = None
    """The run's directory itself; ``exp_dir``, ``name`` and ``version`` are then not used."""
    loggers: tuple[str | Mapping[str, Any], ...] | None = None
    """Components of kind ``logger``: a name, or a mapping of ``name`` and the component's own keys. The loggers
    that ``create_*_logger`` keys switch on come after them. (``metrics.jsonl`` is always written.)"""
    create_tensorboard_logger: bool | None = None
    """Logger ``tensorboard``; ``null`` means: where ``loggers`` is not set."""
    summary_writer_kwargs: Mapping[str, Any] | None = None
    """Keys of the logger ``tensorboard``."""
    create_wandb_logger: bool | None = None
    """Logger ``wandb``."""
    wandb_logger_kwargs: Mapping[str, Any] | None = None
    """Keys of the logger ``wandb``."""
    create_mlflow_logger: bool | None = None
    """Logger ``mlflow``."""
    mlflow_logger_kwargs: Mapping[str, Any] | None = None
    """Keys of the logger ``mlflow``."""
    log_parameter_norm: bool = False
    """Log the 2-norm of all weights, of masters where there are some, as ``parameter_norm``."""
    log_local_rank_0_only: bool = False
    """Only the first rank of each node keeps a log file below ``logs`` of the run's directory. (What ends the run goes
    to ``logs/errors.txt`` from every rank.)"""
    log_global_rank_0_only: bool = False
    """Only the first rank of the run does; not together with ``log_local_rank_0_only``."""
    log_format: Literal["text", "json"] = "text"
    """Lines of these files and of standard error; ``json`` writes one object per line and draws no bar."""
    monitoring: MonitoringConfig = Field(default_factory=MonitoringConfig)
    """State of the run for other programs."""
    ema: EmaConfig = Field(default_factory=EmaConfig)
    """Exponential moving average of the weights."""
    files_to_copy: tuple[SourcePath, ...] | None = None
    """Files to copy to ``files`` below the run's directory at each start."""
    create_early_stopping_callback: bool = False
    """Stop, saved, when a metric no longer improves; a later start with ``resume_if_exists`` stops again at once."""
    early_stopping_callback_params: EarlyStoppingParams = Field(default_factory=EarlyStoppingParams)
    """Its options."""
