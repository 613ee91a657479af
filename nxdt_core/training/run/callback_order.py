"""Which callbacks a run has, in the order in which they see a step."""

from __future__ import annotations

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint

from nxdt_core.checkpoint import Ownership
from nxdt_core.config import ResolvedConfig
from nxdt_core.errors.training import TrainerArgumentsIgnored
from nxdt_core.protocols.checkpoint_storage import CheckpointStorage
from nxdt_core.training import build
from nxdt_core.training.callbacks.checkpoints import CheckpointSaver
from nxdt_core.training.callbacks.compile_time import CompileTime
from nxdt_core.training.callbacks.console import Console
from nxdt_core.training.callbacks.early_stop import EarlyStop
from nxdt_core.training.callbacks.lifecycle import LifecycleHooks
from nxdt_core.training.callbacks.metrics import MetricsWriter
from nxdt_core.training.callbacks.nonfinite import NonFiniteGuard
from nxdt_core.training.callbacks.progress_reports import ProgressReports
from nxdt_core.training.callbacks.resumed import ResumeNotes
from nxdt_core.training.callbacks.save_figures import SaveFigures
from nxdt_core.training.callbacks.signals import StopSignals

__all__ = ["run_callbacks"]


def run_callbacks(
    config: ResolvedConfig,
    own: CheckpointStorage,
    ownership: Ownership | None,
    console: Console,
    metrics: MetricsWriter,
    figures: SaveFigures,
    signals: StopSignals,
) -> list[pl.Callback]:
    """Return the figures first, then what acts on them, then saving; what stops the run on request comes after all of
    them.

    Raises:
        TrainerArgumentsIgnored: a callback of the configuration that saves checkpoints.
    """
    trainer = config.run.trainer
    compiles = config.run.model.compile or build.precision(config).stochastic_rounding
    compiling = [CompileTime(console)] if compiles else []
    guard = [NonFiniteGuard(trainer.log_every_n_steps)] if trainer.nonfinite == "stop" else []
    named = _named(config)
    saver = (
        [CheckpointSaver(own, console, config, metrics, figures, ownership)] if config.run.checkpoint.enabled else []
    )
    manager = config.run.exp_manager
    stopping = (
        [EarlyStop(manager.early_stopping_callback_params, console, min_steps=trainer.min_steps or 0)]
        if manager.create_early_stopping_callback
        else []
    )
    return [
        ProgressReports(),
        ResumeNotes(console),
        *compiling,
        metrics,
        *guard,
        LifecycleHooks(config, metrics, signals),
        *named,
        *stopping,
        *saver,
    ]


def _named(config: ResolvedConfig) -> list[pl.Callback]:
    """The callbacks of the configuration. Lightning's own error of those that save would be a traceback."""
    named = [selected.component.load_target()(selected.config, config.run_dir) for selected in config.callbacks]
    savers = dict.fromkeys(type(each).__name__ for each in named if isinstance(each, Checkpoint))
    if savers:
        raise TrainerArgumentsIgnored(arguments=tuple((saver, "the section checkpoint") for saver in savers))
    return named
