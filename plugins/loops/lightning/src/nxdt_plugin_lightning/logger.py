"""A logger of PyTorch Lightning in ``nxdt train``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from pytorch_lightning import loggers

from nxdt_core.api import Callback, Run
from nxdt_core.errors.training import LoggerCannotStart
from nxdt_plugin_lightning.config import LoggerConfig


@final
class LightningLogger(Callback):
    """Gives metrics to a logger of Lightning.

    Raises:
        LoggerCannotStart: Lightning has no such logger, or it cannot start with these options.
    """

    def __init__(self, config: LoggerConfig, run_dir: Path) -> None:
        names = sorted(name for name in loggers.__all__ if name != "Logger")
        if config.logger not in names:
            reason, advice = "Lightning has no logger of this name", f"Choose one of {', '.join(names)}"
            raise LoggerCannotStart(logger=config.logger, reason=reason, advice=advice)
        logger: Any = getattr(loggers, config.logger)
        place = {"save_dir": str(run_dir)} if "save_dir" in inspect.signature(logger).parameters else {}
        try:
            self._logger: loggers.Logger = logger(**{**place, **config.options})
            _ = getattr(self._logger, "experiment", None)  # which connects
        except Exception as error:
            advice = f"See the arguments of {config.logger}"
            raise LoggerCannotStart(logger=config.logger, reason=str(error).rstrip("."), advice=advice) from error

    def on_log(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Log the metrics."""
        self._logger.log_metrics(dict(metrics), run.step)
        self._logger.save()

    def close(self, run: Run) -> None:
        """End the logger with the status of the run."""
        self._logger.finalize("failed" if run.status == "failed" else "success")
