"""Wrong learning-rate schedules, each with one mistake that a real author could make, under the contract.

Not collected by name: ``test_schedule_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

import itertools
import random
import time
from types import SimpleNamespace

import pytest
import torch
from nxdt_testing.schedule_contract import ScheduleContract

MUTANTS = []


def mutant(factory):
    MUTANTS.append(factory)
    return factory


@mutant
def Right(section, horizon):
    return lambda step: max(0.0, 1 - step / horizon.max_steps)


@mutant
def CountsItsCalls(section, horizon):
    calls = itertools.count()
    return lambda step: 1 / (1 + next(calls))


@mutant
def CountsOnceWarm(section, horizon):
    """Right for a while: the probe of a run does not see it."""
    asked = set()

    def factor(step):
        asked.add(step)
        return 1.0 if len(asked) < 60 else 0.5

    return factor


@mutant
def ReadsTheClock(section, horizon):
    begun = time.monotonic()
    return lambda step: 1 / (1 + time.monotonic() - begun)


@mutant
def DrawsAtRandom(section, horizon):
    return lambda step: random.random()


@mutant
def GoesBelowZero(section, horizon):
    return lambda step: max(-0.1, 1 - 2 * step / horizon.max_steps) if step < horizon.max_steps else 0.0


@mutant
def ReturnsATensor(section, horizon):
    return lambda step: torch.tensor(1.0)


@mutant
def DividesByWhatIsLeft(section, horizon):
    return lambda step: min(1.0, 1 / (horizon.max_steps - step))


@mutant
def ReturnsTheRate(section, horizon):
    return lambda step: horizon.lr * max(0.0, 1 - step / horizon.max_steps)


SHARED = SimpleNamespace(max_steps=0)


@mutant
def KeepsOptionsInItsModule(section, horizon):
    SHARED.max_steps = horizon.max_steps
    return lambda step: max(0.0, 1 - step / SHARED.max_steps)


def under_contract(made):
    class Contract(ScheduleContract):
        @pytest.fixture
        def factory(self):
            return made

    return type(f"Test{made.__name__}", (Contract,), {})


for _mutant in MUTANTS:
    globals()[f"Test{_mutant.__name__}"] = under_contract(_mutant)
