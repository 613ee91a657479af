"""Wrong task suites, each with one mistake that a real author could make, under the contract.

Not collected by name: ``test_task_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from nxdt_testing.task_contract import TaskContract

from nxdt_core.errors import NxdtError
from nxdt_core.protocols.evaluation import TaskSuite
from nxdt_core.train.generate import Sampling

MUTANTS = []
TaskUnknown = NxdtError.define("MINE-1", "An unknown task.", "no task {task}", "Use another.")
TASKS = {"counting": (("1,", "2"), ("3,", "4"), ("5,", "6")), "letters": (("a b", "c"), ("d e", "f"))}


def mutant(cls):
    MUTANTS.append(cls)
    return cls


@mutant
class Right(TaskSuite):
    def __init__(self, tasks, path):
        unknown = [task for task in tasks if task not in TASKS]
        if unknown:
            raise TaskUnknown(task=unknown[0])
        self.tasks = tasks

    def run(self, model, *, limit):
        return {task: {"accuracy": self.share(model, TASKS[task][:limit]), "metric": "accuracy"} for task in self.tasks}

    def share(self, model, records):
        sampling = Sampling(max_new_tokens=2)
        answers = [list(model.continuation(model.tokenizer.encode(prompt), sampling)) for prompt, _ in records]
        right = [wanted in model.tokenizer.decode(ids) for ids, (_, wanted) in zip(answers, records, strict=True)]
        return sum(right) / len(right)


@mutant
class InheritsNothing:
    __init__, run, share = Right.__init__, Right.run, Right.share


@mutant
class FindsUnknownTasksLate(Right):
    def __init__(self, tasks, path):
        self.tasks = tasks


@mutant
class DoesNotNameTheTask(Right):
    def __init__(self, tasks, path):
        try:
            super().__init__(tasks, path)
        except NxdtError:
            raise TaskUnknown(task="of this name") from None


@mutant
class RaisesKeyError(Right):
    def __init__(self, tasks, path):
        self.tasks = [task for task in tasks if TASKS[task]]


@mutant
class ForgetsATask(Right):
    def run(self, model, *, limit):
        return dict(list(super().run(model, limit=limit).items())[:1])


@mutant
class ReturnsTensors(Right):
    def share(self, model, records):
        return torch.tensor(super().share(model, records))


@mutant
class AddsATensor(Right):
    def run(self, model, *, limit):
        return {task: {**row, "spread": torch.zeros(1)} for task, row in super().run(model, limit=limit).items()}


@mutant
class CountsItsRuns(Right):
    runs = itertools.count()

    def share(self, model, records):
        return super().share(model, records) + next(self.runs)


@mutant
class IgnoresTheLimit(Right):
    def run(self, model, *, limit):
        return super().run(model, limit=None)


@mutant
class TrainsTheModel(Right):
    def share(self, model, records):
        share = super().share(model, records)
        with torch.no_grad():
            for _, parameter in model.model.named_parameters():
                parameter.mul_(1.0001)
        return share


def under_contract(made):
    class Contract(TaskContract):
        tasks = tuple(TASKS)

        @pytest.fixture
        def factory(self):
            return made

    return Contract


for _mutant in MUTANTS:
    globals()[f"Test{_mutant.__name__}"] = under_contract(_mutant)
