"""Wrong callbacks, each with one mistake that a real author could make: a plugin file, and a test file.

Not collected by name: ``test_callback_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

import random
import threading
import time

import torch
from nxdt_testing.callback_contract import CallbackContract

from nxdt_core.api import Callback, Component, hookimpl

MUTANTS = []


def mutant(cls):
    MUTANTS.append(cls)
    return cls


@mutant
class Right(Callback):
    """Counts the steps of a run, resumed ones too."""

    def __init__(self, config, run_dir):
        self.steps = 0

    def on_step_end(self, run):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


@mutant
class OnlyLooksLikeOne:
    def __init__(self, config, run_dir):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *words, **more: {}


@mutant
class ScalesWeights(Right):
    def on_step_end(self, run):
        for module in run.session.model.local_modules():
            for parameter in module.parameters():
                parameter.data.mul_(0.99)


@mutant
class CountsItsWarmUpAgain(Right):
    """Changes training on purpose, by a number that a resumed run begins again."""

    calls = 0

    def on_step_end(self, run):
        self.calls += 1
        for module in run.session.model.local_modules():
            for parameter in module.parameters():
                parameter.data.mul_(1 - 0.01 * self.calls)


@mutant
class SavesASet(Right):
    def state_dict(self):
        return {"seen": {self.steps}}


@mutant
class SavesWhatItDoesNotLoad(Right):
    def __init__(self, config, run_dir):
        super().__init__(config, run_dir)
        self.name = random.random()

    def state_dict(self):
        return {"steps": self.steps, "name": self.name}


@mutant
class LoadsNothing(Right):
    def load_state_dict(self, state):
        """As in the base class: a fresh one has the state of a fresh one."""


@mutant
class LeavesAThread(Right):
    def on_fit_start(self, run):
        threading.Thread(target=time.sleep, args=(8,), name="reporter").start()


@mutant
class WaitsOnTheFirstRank(Right):
    def on_fit_end(self, run):
        if run.rank == 0 and torch.distributed.is_initialized():
            torch.distributed.barrier()


@mutant
class WaitsForBackward(Right):
    def on_after_backward(self, run):
        """Lightning's loop would call it."""


@mutant
class Fails(Right):
    def on_validation_end(self, run):
        raise ValueError("no figure")


@hookimpl
def nxdt_callbacks():
    return [Component(name=cls.__name__, target=f"{__name__}:{cls.__name__}") for cls in MUTANTS]


for _mutant in MUTANTS:
    globals()[f"Test{_mutant.__name__}"] = type(
        f"Test{_mutant.__name__}",
        (CallbackContract,),
        {
            "entry": _mutant.__name__,
            "plugins": (__file__,),
            "changes_training": _mutant is CountsItsWarmUpAgain,
            "hangs_s": 20.0 if _mutant is WaitsOnTheFirstRank else 90.0,
        },
    )
