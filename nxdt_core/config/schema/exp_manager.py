"""Section ``exp_manager``: where a run writes, what it logs. The docstrings are the YAML reference.

Its keys about checkpoints are older spellings of keys of ``checkpoint``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from nxdt_core.config.annotations import (
    AliasOf,
    DefaultsTo,
    Fraction,
    NoEffect,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SourcePath,
)
from nxdt_core.config.fields.duration import Duration
from nxdt_core.config.schema.monitoring import MonitoringConfig

__all__ = ["CheckpointCallbackParams", "EarlyStoppingParams", "EmaConfig", "ExpManagerConfig"]

_OWN_FORMAT = "checkpoints have nxdt's own format"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCallbackParams:
    """Older spellings of keys of ``checkpoint``, and keys of the incumbent's file format."""

    dirpath: Annotated[str | None, AliasOf("checkpoint.uri")] = None
    """``checkpoint.uri``."""
    monitor: Annotated[str, AliasOf("checkpoint.monitor")] = "step"
    """``checkpoint.monitor``."""
    mode: Annotated[Literal["min", "max"], AliasOf("checkpoint.mode")] = "max"
    """``checkpoint.mode``."""
    save_top_k: Annotated[int, AliasOf("checkpoint.save_top_k")] = 3
    """``checkpoint.save_top_k``."""
    save_last: Annotated[bool, AliasOf("checkpoint.save_last")] = True
    """``checkpoint.save_last``."""
    every_n_train_steps: Annotated[PositiveInt | None, AliasOf("checkpoint.every_n_train_steps")] = None
    """``checkpoint.every_n_train_steps``."""
    async_save: Annotated[bool, AliasOf("checkpoint.async_save")] = True
    """``checkpoint.async_save``."""
    filename: Annotated[str | None, NoEffect("checkpoints are named after their step")] = None
    """Template of a checkpoint's name."""
    prefix: Annotated[str | None, NoEffect("checkpoints are named after their step")] = None
    """Text before a checkpoint's name."""
    postfix: Annotated[str | None, NoEffect("checkpoints are named after their step")] = None
    """Text after a checkpoint's name."""
    enable_version_counter: Annotated[bool, NoEffect("checkpoints are named after their step")] = False
    """Count up names that exist."""
    train_time_interval: Annotated[Duration | None, AliasOf("checkpoint.train_time_interval")] = None
    """``checkpoint.train_time_interval``."""
    every_n_epochs: NonNegativeInt | None = None
    """Passes over the training data between two checkpoints, as steps; ``null`` or 0 counts
    ``checkpoint.every_n_train_steps``."""
    save_on_train_epoch_end: bool | None = None
    """Save at the end of each pass over the data."""
    save_nemo_on_train_end: bool = False
    """Write NeMo's archive at the end."""
    always_save_nemo: bool = False
    """Write NeMo's archive next to each checkpoint."""
    save_weights_only: bool = False
    """Leave the optimizer's state out."""
    save_best_model: bool = False
    """Write the best checkpoint again at the end."""
    save_last_n_optim_states: int = -1
    """Keep optimizer state in the newest checkpoints only; -1 keeps all."""
    model_parallel_size: Annotated[int | None, NoEffect("the layout comes from distributed_strategy")] = None
    """TP × PP."""
    use_master_weights_in_ckpt: bool = False
    """Insist on float32 as the model's weights, as is the way unless ``checkpoint.save_bf16`` says otherwise: ``true``
    refuses that key, and a precision that keeps no float32 weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaConfig:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStoppingParams:
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
    verbose: Annotated[bool, NoEffect("why a run stops is always said")] = True
    """Say why."""
    check_on_train_epoch_end: Annotated[bool | None, NoEffect("metrics are judged after each validation")] = None
    """Judge at the end of each pass."""
    log_rank_zero_only: Annotated[bool, NoEffect("rank 0 speaks for all")] = False
    """One rank says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpManagerConfig:
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
    create_dllogger_logger: bool | None = None
    """Logger ``dllogger``."""
    dllogger_logger_kwargs: Mapping[str, Any] | None = None
    """Keys of the logger ``dllogger``."""
    create_clearml_logger: bool | None = None
    """Logger ``clearml``."""
    clearml_logger_kwargs: Mapping[str, Any] | None = None
    """Keys of the logger ``clearml``."""
    create_neptune_logger: bool | None = None
    """Logger ``neptune``."""
    neptune_logger_kwargs: Mapping[str, Any] | None = None
    """Keys of the logger ``neptune``."""
    log_parameter_norm: bool = False
    """Log the 2-norm of all weights, of masters where there are some, as ``parameter_norm``."""
    log_gradient_norm: Annotated[bool, NoEffect("grad_norm is always logged")] = True
    """Log the 2-norm of the gradient before clipping."""
    log_local_rank_0_only: bool = False
    """Only the first rank of each node keeps a log file below ``logs`` of the run's directory. (What ends the run goes
    to ``logs/errors.txt`` from every rank.)"""
    log_global_rank_0_only: bool = False
    """Only the first rank of the run does; not together with ``log_local_rank_0_only``."""
    log_format: Literal["text", "json"] = "text"
    """Lines of these files and of standard error; ``json`` writes one object per line and draws no bar."""
    monitoring: MonitoringConfig = field(default_factory=MonitoringConfig)
    """State of the run for other programs."""
    resume_if_exists: Annotated[bool, AliasOf("checkpoint.resume_if_exists")] = False
    """``checkpoint.resume_if_exists``."""
    resume_ignore_no_checkpoint: Annotated[bool, AliasOf("checkpoint.resume_ignore_no_checkpoint")] = False
    """``checkpoint.resume_ignore_no_checkpoint``."""
    resume_past_end: Annotated[bool, AliasOf("checkpoint.resume_past_end")] = False
    """``checkpoint.resume_past_end``."""
    resume_from_checkpoint: Annotated[SourcePath | None, AliasOf("checkpoint.resume_from")] = None
    """``checkpoint.resume_from``."""
    create_checkpoint_callback: Annotated[bool, AliasOf("checkpoint.enabled")] = True
    """``checkpoint.enabled``."""
    async_checkpointing: Annotated[bool, AliasOf("checkpoint.async_save")] = True
    """``checkpoint.async_save``."""
    checkpoint_callback_params: CheckpointCallbackParams = field(default_factory=CheckpointCallbackParams)
    """Older spellings of keys of ``checkpoint``."""
    save_xser: Annotated[bool, NoEffect(_OWN_FORMAT)] = True
    """Save tensor by tensor."""
    load_xser: Annotated[bool, NoEffect(_OWN_FORMAT)] = True
    """Load tensor by tensor."""
    save_bf16: Annotated[bool, AliasOf("checkpoint.save_bf16")] = False
    """``checkpoint.save_bf16``."""
    ckpt_ptl_version: Annotated[str | None, NoEffect(_OWN_FORMAT)] = None
    """Version of Lightning assumed for checkpoints that do not say theirs."""
    enable_recovery_time_instrumentation: bool = False
    """Time the parts of a restart."""
    log_step_timing: Annotated[bool, NoEffect("step_time_s is always logged")] = True
    """Log the time of a step."""
    step_timing_kwargs: Annotated[Mapping[str, Any] | None, NoEffect("step_time_s is always logged")] = None
    """Options of that timer."""
    ema: EmaConfig = field(default_factory=EmaConfig)
    """Exponential moving average of the weights."""
    disable_validation_on_resume: Annotated[bool, NoEffect("a resume never validates at once")] = True
    """Do not validate once more directly after a resume."""
    files_to_copy: tuple[SourcePath, ...] | None = None
    """Files to copy to ``files`` below the run's directory at each start."""
    create_early_stopping_callback: bool = False
    """Stop, saved, when a metric no longer improves; a later start with ``resume_if_exists`` stops again at once."""
    early_stopping_callback_params: EarlyStoppingParams = field(default_factory=EarlyStoppingParams)
    """Its options."""
    create_preemption_callback: Annotated[bool, NoEffect("SIGTERM always saves and stops")] = False
    """Save when the scheduler preempts."""
    create_straggler_detection_callback: bool = False
    """Find slow ranks."""
    straggler_detection_params: Mapping[str, Any] | None = None
    """Its options."""
    create_fault_tolerance_callback: bool = False
    """NVIDIA's fault tolerance."""
    fault_tolerance: Mapping[str, Any] | None = None
    """Its options."""
    max_time_per_run: Annotated[Duration | None, AliasOf("trainer.max_time")] = None
    """``trainer.max_time``."""
    max_time: Annotated[Duration | None, AliasOf("trainer.max_time")] = None
    """``trainer.max_time``."""
    seconds_to_sleep: Annotated[float, NoEffect("ranks meet at a barrier")] = 5
    """Wait of the other ranks for rank 0."""
