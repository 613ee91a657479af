"""The task suite ``lm-eval``. The library is imported when the suite is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nxdt_core.protocols.evaluation import TaskSuite
from nxdt_plugin_evaluate.errors import EvaluationLibraryMissing

if TYPE_CHECKING:
    from nxdt_core.train.generate import LoadedModel


class Harness(TaskSuite):
    """Tasks of lm-evaluation-harness: a :class:`~nxdt_core.protocols.evaluation.TaskSuite`.

    Raises:
        EvaluationLibraryMissing: the library is not installed.
        TaskUnknown: it does not have one of the tasks.
    """

    def __init__(self, tasks: Sequence[str], path: str | None) -> None:
        try:
            from nxdt_plugin_evaluate.harness import find_tasks, run_tasks
        except ImportError as error:
            raise EvaluationLibraryMissing(
                needed_by="Tasks",
                library="lm-evaluation-harness",
                package="nxdt-plugin-evaluate[lm-eval]",
                reason=str(error),
            ) from error
        manager = find_tasks(tasks, path)
        self._run: Callable[..., Mapping[str, Mapping[str, Any]]] = partial(run_tasks, tasks=tasks, manager=manager)

    def run(self, model: LoadedModel, *, limit: int | None) -> Mapping[str, Mapping[str, Any]]:
        """Return the figures of each task; see :func:`nxdt_plugin_evaluate.harness.run_tasks`."""
        return self._run(model, limit=limit)
