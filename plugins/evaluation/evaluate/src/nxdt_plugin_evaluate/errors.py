"""Errors of this plugin: codes ``NXDT-E005`` to ``NXDT-E008`` and ``NXDT-E010``."""

from __future__ import annotations

from typing import Any

from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import listing

__all__ = [
    "EvaluationLibraryMissing",
    "TaskRecordUnscorable",
    "TaskSamplesOtherwise",
    "TaskUnknown",
    "TaskUnusable",
]


class EvaluationLibraryMissing(NxdtError):
    """A metric whose library is not installed."""

    code = "NXDT-E005"
    happened = "{needed_by} need {library}, which cannot be imported: {reason}."
    remedy = "pip install '{package}'"
    needed_by: str
    library: str
    package: str
    """What to install, with the extra."""
    reason: str


class TaskRecordUnscorable(NxdtError):
    """An answer whose probability cannot be computed."""

    code = "NXDT-E007"
    happened = "An answer of the task cannot be scored: {reason}."
    remedy = "Correct the record, or take a task whose answers this model can be asked."
    reason: str


class TaskSamplesOtherwise(NxdtError):
    """A task whose tokens are to be chosen in a way that is not known here."""

    code = "NXDT-E008"
    happened = "The task asks for {name}: {value}, which is not known here."
    remedy = "Its generation_kwargs may have {understood}."
    name: str
    value: object
    known: tuple[str, ...]

    def _view(self) -> dict[str, Any]:
        return {**super()._view(), "understood": listing(self.known)}


class TaskUnknown(NxdtError):
    """A task that the harness does not have."""

    code = "NXDT-E006"
    happened = "The harness has no task {task!r}{near}."
    remedy = "List its tasks with 'lm-eval ls tasks', or pass the directory of your custom tasks with --task-path."
    task: str
    candidates: tuple[str, ...] = ()

    def _view(self) -> dict[str, Any]:
        near = f"; it has {listing(self.candidates)}" if self.candidates else ""
        return {**super()._view(), "near": near}


class TaskUnusable(NxdtError):
    """A task whose records or templates the harness cannot use."""

    code = "NXDT-E010"
    happened = "The harness cannot run {tasks}: {reason}."
    remedy = (
        "See that its data are there, or can be fetched from here, and that its templates fit them; the library says "
        "more with: lm-eval validate --tasks TASK."
    )
    tasks: str
    reason: str
