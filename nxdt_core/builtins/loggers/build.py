"""Built-in loggers: stock Lightning loggers, placed in the run's directory."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pytorch_lightning.loggers import Logger, TensorBoardLogger

from nxdt_core.builtins.loggers.config import MLFlowConfig, WandbConfig
from nxdt_core.errors.training import LoggerCannotStart, LoggerLibraryMissing
from nxdt_core.regular_files import read_text

if TYPE_CHECKING:
    from pytorch_lightning.loggers import MLFlowLogger, WandbLogger

__all__ = ["mlflow", "tensorboard", "wandb"]

_log = logging.getLogger(__name__)

_TRACKING = "MLFLOW_TRACKING_URI"


def tensorboard(config: object, run_dir: Path) -> Logger:
    """Event files directly in ``run_dir``; the writer is created at the first logged step."""
    _quieten_writer()
    return _EventFiles(save_dir=str(run_dir), name="", version="")


def wandb(config: WandbConfig, run_dir: Path) -> WandbLogger:
    """Return a run at Weights & Biases with the run's configuration; its files are in ``wandb`` below ``run_dir``.

    Raises:
        LoggerLibraryMissing: wandb is not installed.
        LoggerCannotStart: no account, no network, or a key that it does not take.
    """
    with _starting("wandb", advice="Log in with `wandb login`, or write files only: WANDB_MODE=offline"):
        from nxdt_core.builtins.loggers.wandb import FinishedWandbLogger

        logger = FinishedWandbLogger(
            name=config.name or run_dir.name,
            project=config.project,
            save_dir=str(run_dir),
            id=config.id,
            offline=config.offline or os.environ.get("WANDB_MODE") == "offline",
            prefix=config.prefix,
            resume=config.resume,
            config=yaml.safe_load(read_text(run_dir / "config.yaml")),
            **_given(entity=config.entity, group=config.group, job_type=config.job_type, notes=config.notes),
            **_given(tags=config.tags),
        )
        _ = logger.experiment
    return logger


def mlflow(config: MLFlowConfig, run_dir: Path) -> MLFlowLogger:
    """Return a run at MLflow, with ``config.yaml`` as a file of it.

    Raises:
        LoggerLibraryMissing: mlflow is not installed.
        LoggerCannotStart: its server or store does not answer, or does not take a key.
    """
    shared = config.tracking_uri or os.environ.get(_TRACKING)
    own = run_dir.absolute()
    advice = "Check exp_manager.mlflow_logger_kwargs.tracking_uri"
    with _starting("mlflow", advice=advice), _environment_kept(_TRACKING):
        from pytorch_lightning.loggers import MLFlowLogger

        logger = MLFlowLogger(
            experiment_name=config.experiment_name,
            run_name=config.run_name or run_dir.name,
            tracking_uri=shared or f"sqlite:///{own}/mlflow.db",
            tags=dict(config.tags or {}),
            prefix=config.prefix,
            artifact_location=config.artifact_location or (None if shared else (own / "mlartifacts").as_uri()),
            run_id=config.run_id,
        )
        logger.experiment.log_artifact(logger.run_id, str(run_dir / "config.yaml"))
    return logger


class _EventFiles(TensorBoardLogger):
    """Event files without hyper-parameters, since ``config.yaml`` is in the same directory."""

    def save(self) -> None:
        """Send the buffered records."""
        with suppress(OSError):  # reported at the end
            self.experiment.flush()

    def finalize(self, status: str) -> None:
        """Flush and close the file; what cannot be written is lost with a warning, and the run is not."""
        try:
            super().finalize(status)
        except OSError as error:
            _log.warning("TensorBoard's event files in %s are incomplete: %s", self.save_dir, error.strerror or error)


@cache
def _quieten_writer() -> None:
    """Let Python print no traceback where TensorBoard's thread cannot write: the thread hands the error to the next
    call that logs or flushes."""
    before = threading.excepthook

    def hook(ended: threading.ExceptHookArgs) -> None:
        of_writer = type(ended.thread).__module__.startswith("tensorboard.")
        if not (of_writer and isinstance(ended.exc_value, OSError)):
            before(ended)

    threading.excepthook = hook


@contextmanager
def _environment_kept(name: str) -> Iterator[None]:
    """Undo what the block does to a variable: mlflow puts a run's store there, and the next run would log to it."""
    before = os.environ.get(name)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@contextmanager
def _starting(package: str, *, advice: str) -> Iterator[None]:
    """Raise an error for users in place of what a library raises as its logger starts: users can fix most of these."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise LoggerLibraryMissing(logger=package, package=package, reason=str(error)) from error
    try:
        yield
    except Exception as error:
        raise LoggerCannotStart(logger=package, reason=str(error).rstrip("."), advice=advice) from error
