"""Errors of this plugin: codes ``NXDT-E005`` to ``NXDT-E008`` and ``NXDT-E010``."""

from __future__ import annotations

from nxdt_core.errors import NxdtError
from nxdt_core.errors.base import listing

EvaluationLibraryMissing = NxdtError.define(
    "NXDT-E005",
    "A metric whose library is not installed.",
    "{needed_by} need {library}, which cannot be imported: {reason}.",
    "pip install '{package}'",
)

TaskRecordUnscorable = NxdtError.define(
    "NXDT-E007",
    "An answer whose probability cannot be computed.",
    "An answer of the task cannot be scored: {reason}.",
    "Correct the record, or take a task whose answers this model can be asked.",
)

TaskSamplesOtherwise = NxdtError.define(
    "NXDT-E008",
    "A task whose tokens are to be chosen in a way that is not known here.",
    "The task asks for {name}: {value}, which is not known here.",
    "Its generation_kwargs may have {known:list}.",
)


TaskUnknown = NxdtError.define(
    "NXDT-E006",
    "A task that the harness does not have.",
    "The harness has no task {task!r}{near}.",
    "List its tasks with 'lm-eval ls tasks', or pass the directory of your custom tasks with --task-path.",
    defaults={"candidates": ()},
    also=lambda error: {"near": f"; it has {listing(error.candidates)}" if error.candidates else ""},
)

TaskUnusable = NxdtError.define(
    "NXDT-E010",
    "A task whose records or templates the harness cannot use.",
    "The harness cannot run {tasks}: {reason}.",
    "See that its data are there, or can be fetched from here, and that its templates fit them; the library says "
    "more with: lm-eval validate --tasks TASK.",
)
