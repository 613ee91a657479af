"""Tests that every task suite must pass; its author subclasses it once.

Example, the whole test file of a plugin::

    from nxdt_testing.task_contract import TaskContract

    class TestMyTasks(TaskContract):
        tasks = ("counting",)

        @pytest.fixture
        def factory(self):
            return MyTasks

The model is a small one of one layer over bytes, which has seen four steps.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
from torch.nn.modules.module import register_module_forward_hook

from nxdt_core.errors import NxdtError
from nxdt_core.protocols.evaluation import TaskSuite
from nxdt_core.train.generate import LoadedModel, load_model
from nxdt_testing.contract import ComponentContract, copied, no_error
from nxdt_testing.runs.run import differing
from nxdt_testing.runs.small_run import small_config, train_small

__all__ = ["TaskContract"]

_UNKNOWN = "no-suite-has-a-task-of-this-name"
_Factory = Callable[[Sequence[str], str | None], TaskSuite]


class TaskContract(ComponentContract):
    """The tests of a task suite: subclass it, set :attr:`tasks` and override the fixture ``factory``."""

    tasks: ClassVar[Sequence[str]]
    """Tasks to run, at least one; quick ones."""

    @pytest.fixture
    def path(self) -> str | None:
        """Return the directory of the tasks, as ``--task-path`` gives it; None for those that the suite has."""
        return None

    @pytest.fixture
    def model(self) -> LoadedModel:
        """Return the model that is judged."""
        return _small_model()

    def test_it_is_a_suite(self, factory: _Factory, path: str | None) -> None:
        """It is made with tasks and a path, and inherits from the base class."""
        assert isinstance(factory(self.tasks, path), TaskSuite), "inherit from nxdt_core.protocols.evaluation.TaskSuite"

    def test_an_unknown_task_is_an_error_before_a_model_is_loaded(self, factory: _Factory, path: str | None) -> None:
        """Loading takes minutes; the error is one of nxdt, which users see without a traceback, and names the task."""
        message = ""
        try:
            with no_error(
                "an unknown task must raise an NxdtError, such as NxdtError.define makes; it raised", but=NxdtError
            ):
                factory((*self.tasks, _UNKNOWN), path)
        except NxdtError as error:
            message = str(error)
        assert message, "a task that the suite does not have must be an error when the suite is made"
        assert _UNKNOWN in message, f"the error about an unknown task must name it: {message}"

    def test_each_task_has_finite_numbers_by_name(
        self, factory: _Factory, path: str | None, model: LoadedModel
    ) -> None:
        """`nxdt evaluate` prints them in a row per task; it may have texts as well."""
        figures_of_tasks = factory(self.tasks, path).run(model, limit=1)
        assert isinstance(figures_of_tasks, Mapping), (
            f"run must return figures by task; it returned {figures_of_tasks!r}"
        )
        missing = [task for task in self.tasks if task not in figures_of_tasks]
        assert not missing, f"run returned nothing of the task {missing[0]!r}"
        for task, figures in figures_of_tasks.items():
            numbers = {name: number for name, number in figures.items() if isinstance(number, (int, float))}
            assert numbers, f"the task {task!r} has no number: {figures!r}"
            wrong = [name for name, number in numbers.items() if not math.isfinite(number)]
            assert not wrong, f"{wrong[0]} of the task {task!r} is {numbers[wrong[0]]!r}, which is not finite"
            with no_error(f"the figures of the task {task!r} must be plain values:"):
                json.dumps({task: dict(figures)})

    def test_it_finds_the_same_again(self, factory: _Factory, path: str | None, model: LoadedModel) -> None:
        """Sampling is greedy or seeded, and a run keeps nothing for the next one."""
        suite = factory(self.tasks, path)
        first, again = suite.run(model, limit=2), suite.run(model, limit=2)
        assert first == again, f"the same model has {first}, and {again} when it is judged again"
        other = factory(self.tasks, path).run(model, limit=2)
        assert first == other, f"the same model has {first}, and {other} by another suite of the same tasks"

    def test_a_limit_leaves_records_out(self, factory: _Factory, path: str | None, model: LoadedModel) -> None:
        """``limit=1`` asks the model, and less often than None does: tasks of the contract have several records."""
        asked: list[str] = []
        hook = register_module_forward_hook(lambda module, inputs, output: asked.append(type(module).__name__))
        try:
            factory(self.tasks, path).run(model, limit=1)
            one = len(asked)
            factory(self.tasks, path).run(model, limit=None)
        finally:
            hook.remove()
        every = len(asked) - one
        assert one, "run asked the model nothing"
        assert one < every, f"limit=1 and limit=None run {one} and {every} layers; limit counts records of each task"

    def test_it_leaves_the_model_as_it_is(self, factory: _Factory, path: str | None, model: LoadedModel) -> None:
        """Several suites judge one model."""
        before = copied(model.model.named_parameters())
        factory(self.tasks, path).run(model, limit=1)
        changed = differing(dict(model.model.named_parameters()), before)
        assert not changed, f"run changed the parameter {changed[0]!r}"


@cache
def _small_model() -> LoadedModel:
    with tempfile.TemporaryDirectory(prefix="nxdt-suite-") as place:
        config = small_config(Path(place), "judged", trainer={"limit_val_batches": 0})
        run_dir = train_small(config)
        return load_model(str(run_dir / "checkpoints"), config=str(run_dir / "config.yaml"))
