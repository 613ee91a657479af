"""Errors of what surrounds a run's steps: its figures, its files, its loggers."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors.base import NxdtError, listing

__all__ = ["CannotCopyFile", "LengthUnknown", "LoggerCannotStart", "LoggerLibraryMissing", "MetricNotLogged"]


class LengthUnknown(NxdtError):
    """A setting that counts passes over data, or cuts them, and data without a length."""

    code = "NXDT-T011"
    happened = "{key} needs to know how many samples the training data have, and they are a stream."
    remedy = (
        "Count steps instead (trainer.max_steps, trainer.val_check_interval, checkpoint.every_n_train_steps), or train "
        "on data with a length."
    )
    key: str


class MetricNotLogged(NxdtError):
    """Early stopping on a metric that the run does not have."""

    code = "NXDT-T012"
    happened = "Early stopping judges {metric!r}, which nobody logs; there are {names}."
    remedy = "Set exp_manager.early_stopping_callback_params.monitor to one of them, or its strict to false."
    metric: str
    known: list[str]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "names": listing(self.known, 12) or "none"}


class CannotCopyFile(NxdtError):
    """A file of ``exp_manager.files_to_copy``."""

    code = "NXDT-T013"
    happened = "exp_manager.files_to_copy names {path}, which cannot be copied: {reason}."
    remedy = "Name files that exist, of different names; relative ones start at the working directory."
    path: str
    reason: str


class LoggerLibraryMissing(NxdtError):
    """A logger whose library is not installed."""

    code = "NXDT-T014"
    happened = "The logger '{logger}' needs the package '{package}', which cannot be imported: {reason}."
    remedy = "Run: pip install 'nxdt-core[{logger}]', or switch it off: exp_manager.create_{logger}_logger=false."
    logger: str
    package: str
    reason: str


class LoggerCannotStart(NxdtError):
    """A logger whose library is there, and refuses."""

    code = "NXDT-T015"
    happened = "The logger '{logger}' cannot start: {reason}."
    remedy = "{advice}; or switch it off: exp_manager.create_{logger}_logger=false."
    logger: str
    reason: str
    advice: str
