"""Wrong callbacks, each with one mistake that a real author could make: a plugin file, and a test file.

Not collected by name: ``test_callback_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

import random
import threading
import time

import pytorch_lightning as pl
import torch

from nxdt_core.api import CallbackComponent, hookimpl
from nxdt_core.testing.callback_contract import CallbackContract

MUTANTS = []


def mutant(cls):
    MUTANTS.append(cls)
    return cls


@mutant
class Right(pl.Callback):
    """Counts the steps of a run, resumed ones too."""

    def __init__(self, config, run_dir):
        self.steps = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
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
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for module in pl_module.model.local_modules():
            for parameter in module.parameters():
                parameter.data.mul_(0.99)


@mutant
class CountsItsWarmUpAgain(Right):
    """Changes training on purpose, by a number that a resumed run begins again."""

    calls = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.calls += 1
        for module in pl_module.model.local_modules():
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
class LeavesAThread(Right):
    def on_train_start(self, trainer, pl_module):
        threading.Thread(target=time.sleep, args=(8,), name="reporter").start()


@mutant
class WaitsOnTheFirstRank(Right):
    def on_train_end(self, trainer, pl_module):
        if trainer.is_global_zero and torch.distributed.is_initialized():
            torch.distributed.barrier()


@mutant
class WaitsForBackward(Right):
    def on_after_backward(self, trainer, pl_module):
        """Lightning's own loop would call it."""


@hookimpl
def nxdt_callbacks():
    return [CallbackComponent(name=cls.__name__, target=f"{__name__}:{cls.__name__}") for cls in MUTANTS]


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
