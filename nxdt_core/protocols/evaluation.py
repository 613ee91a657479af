"""Kinds ``metric`` and ``task``: what ``nxdt evaluate`` reports of a model. Torch-free.

Example of a metric::

    class Length(Metric):
        def compute(self, wanted, given):
            return {"length": sum(map(len, given)) / len(given)}
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Metric", "TaskSuite"]


class Metric(ABC):
    """The target of the kind ``metric``, called as ``Target()``. ``nxdt evaluate`` reports every installed metric."""

    @abstractmethod
    def compute(self, wanted: Sequence[str], given: Sequence[str]) -> Mapping[str, float]:
        """Return figures by name over all answers.

        Args:
            wanted: The right answer to each question, at least one.
            given: What the model wrote, in the same order.
        """


class TaskSuite(ABC):
    """The target of the kind ``task``, called as ``Target(tasks, path)`` before a model is loaded: with the names
    of ``--task`` and the directory of ``--task-path``, or None. It raises an NxdtError for an unknown task."""

    def __init__(self, tasks: Sequence[str], path: str | None) -> None:
        self.tasks, self.path = tasks, path

    @abstractmethod
    def run(self, model: Any, *, limit: int | None) -> Mapping[str, Mapping[str, Any]]:
        """Return the figures of each task by name.

        Args:
            model: A :class:`nxdt_core.train.generate.LoadedModel`.
            limit: Records of each task; None takes all.
        """
