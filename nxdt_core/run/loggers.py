"""Built-in loggers: callbacks that write metrics by TensorBoard, Weights & Biases and MLflow. Imports no torch."""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, final

import yaml

from nxdt_core.callback import Callback, Run
from nxdt_core.config.section import Section
from nxdt_core.errors.training import LoggerCannotStart, LoggerLibraryMissing
from nxdt_core.system.regular_files import read_text

_log = logging.getLogger(__name__)
_TRACKING = "MLFLOW_TRACKING_URI"
_STEP = "trainer/global_step"
"""W&B's axis of steps: a name that its users know from PyTorch Lightning, since runs are compared in one project."""


class WandbConfig(Section):
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
    """Action if the ``id`` already exists: see ``wandb.init``."""


class MLFlowConfig(Section):
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
    """Location of the files of a new experiment; ``null`` leaves it to the server or store."""


@final
class TensorBoard(Callback):
    """Event files directly in the run's directory, made with the first metric. Steps that a resumed run repeats replace
    those before."""

    def __init__(self, config: object, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._writer: Any = None
        _quieten_writer()

    def on_log(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Write the metrics through to the file."""
        writer = self._opened(run)
        for name, value in metrics.items():
            writer.add_scalar(name, value, run.step)
        with suppress(OSError):  # reported at the end
            writer.flush()

    def on_text(self, run: Run, name: str, text: str) -> None:
        """Write a text."""
        self._opened(run).add_text(name, text, run.step)

    def close(self, run: Run) -> None:
        """Close the file; what cannot be written is lost with a warning, and the run is not."""
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            _log.warning("TensorBoard's event files in %s are incomplete: %s", self._run_dir, error.strerror or error)

    def _opened(self, run: Run) -> Any:
        if self._writer is None:
            with _starting("tensorboard", install="tensorboard", advice="Reinstall tensorboard"):
                # TensorBoard would import botocore, for event files in S3: let it find that it is not installed.
                hidden = "botocore" not in sys.modules
                if hidden:
                    sys.modules["botocore"] = None  # type: ignore[assignment]
                try:
                    from torch.utils.tensorboard import SummaryWriter
                finally:
                    if hidden:
                        del sys.modules["botocore"]
            first = run.step + 1 if run.step else 0  # a run that starts again in a used directory replaces all
            self._writer = SummaryWriter(log_dir=str(self._run_dir), purge_step=first)
        return self._writer


@final
class Wandb(Callback):
    """A run at Weights & Biases with the run's configuration; its files are in ``wandb`` of the run's directory.

    Raises:
        LoggerLibraryMissing: wandb is not installed.
        LoggerCannotStart: no account, no network, or a key that it does not take.
    """

    def __init__(self, config: WandbConfig, run_dir: Path) -> None:
        self._prefix = f"{config.prefix}-" if config.prefix else ""
        offline = config.offline or os.environ.get("WANDB_MODE") == "offline"
        with _starting(
            "wandb",
            install="nxdt-core[wandb]",
            advice="Log in with `wandb login`, or write files only: WANDB_MODE=offline",
        ):
            import wandb

            chosen = {name: getattr(config, name) for name in ("entity", "group", "job_type", "notes", "tags")}
            chosen["mode"] = "offline" if offline else None
            self._run = wandb.init(
                name=config.name or run_dir.name,
                project=config.project or os.environ.get("WANDB_PROJECT", "lightning_logs"),
                dir=str(run_dir),
                id=config.id,
                resume=config.resume,
                config=yaml.safe_load(read_text(run_dir / "config.yaml")),
                **{name: value for name, value in chosen.items() if value is not None},
            )
            self._run.define_metric(_STEP)
            self._run.define_metric("*", step_metric=_STEP, step_sync=True)

    def on_log(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Send the metrics."""
        self._run.log({**{self._prefix + name: value for name, value in metrics.items()}, _STEP: run.step})

    def close(self, run: Run) -> None:
        """End the run with the status of the training, so that a second training of the process has its own."""
        self._run.finish(exit_code=int(run.status == "failed"))


@final
class MLflow(Callback):
    """A run at MLflow, with ``config.yaml`` as a file of it.

    Raises:
        LoggerLibraryMissing: mlflow is not installed.
        LoggerCannotStart: its server or store does not answer, or does not take a key.
    """

    def __init__(self, config: MLFlowConfig, run_dir: Path) -> None:
        self._prefix = f"{config.prefix}-" if config.prefix else ""
        shared, directory = config.tracking_uri or os.environ.get(_TRACKING), run_dir.absolute()
        with _starting(
            "mlflow", install="nxdt-core[mlflow]", advice="Check exp_manager.mlflow_logger_kwargs.tracking_uri"
        ):
            from mlflow.tracking import MlflowClient
            from mlflow.tracking.context.registry import resolve_tags

            self._client: Any = MlflowClient(shared or f"sqlite:///{directory}/mlflow.db")
            existing = self._client.get_experiment_by_name(config.experiment_name)
            self._id: str = config.run_id or ""
            if not self._id:
                place = config.artifact_location or (None if shared else (directory / "mlartifacts").as_uri())
                usable = existing is not None and existing.lifecycle_stage != "deleted"
                experiment = (
                    existing.experiment_id if usable else self._client.create_experiment(config.experiment_name, place)
                )
                tags, name = resolve_tags(dict(config.tags or {})), config.run_name or run_dir.name
                self._id = self._client.create_run(experiment, tags=tags, run_name=name).info.run_id
            self._client.log_artifact(self._id, str(run_dir / "config.yaml"))

    def on_log(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Send the metrics in one request, under names without the characters that MLflow does not take."""
        from mlflow.entities import Metric

        now, prefix = int(time.time() * 1000), self._prefix
        rows = [Metric(re.sub(r"[^\w/. -]+", "", prefix + key), value, now, run.step) for key, value in metrics.items()]
        self._client.log_batch(self._id, metrics=rows)

    def close(self, run: Run) -> None:
        """End the run with the status of the training."""
        self._client.set_terminated(self._id, "FAILED" if run.status == "failed" else "FINISHED")


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
def _starting(package: str, *, install: str, advice: str) -> Iterator[None]:
    """Raise an error for users in place of what a library raises as its logger starts: users can fix most of these.

    Args:
        package: to import; also the name of the logger.
        install: what to install where the package is missing, as pip takes it.
        advice: what to do where the library is there and fails, as a sentence without an end.
    """
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise LoggerLibraryMissing(logger=package, package=package, install=install, reason=str(error)) from error
    try:
        yield
    except Exception as error:
        raise LoggerCannotStart(logger=package, reason=str(error).rstrip("."), advice=advice) from error
