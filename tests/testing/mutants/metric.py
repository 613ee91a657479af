"""Wrong metrics, each with one mistake that a real author could make, under the contract.

Not collected by name: ``test_metric_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

import pytest
import torch
from nxdt_testing.metric_contract import MetricContract

from nxdt_core.protocols.evaluation import Metric

MUTANTS = []


def mutant(cls):
    MUTANTS.append(cls)
    return cls


def share(wanted, given):
    return sum(map(str.__eq__, wanted, given)) / len(wanted)


@mutant
class Right(Metric):
    def compute(self, wanted, given):
        return {"share": share(wanted, given), "length": sum(map(len, given)) / len(given)}


@mutant
class IsCalled:
    def __call__(self, wanted, given):
        return {"share": share(wanted, given)}


@mutant
class ReturnsATensor(Metric):
    def compute(self, wanted, given):
        return {"share": torch.tensor(share(wanted, given))}


@mutant
class ReturnsOneNumber(Metric):
    def compute(self, wanted, given):
        return share(wanted, given)


@mutant
class DividesByItsMatches(Metric):
    def compute(self, wanted, given):
        right = sum(map(str.__eq__, wanted, given))
        return {"length": sum(map(len, given)) / right}


@mutant
class IsNotANumberWithoutMatches(Metric):
    def compute(self, wanted, given):
        return {"share": share(wanted, given) or float("nan")}


@mutant
class TakesTheFirstWord(Metric):
    def compute(self, wanted, given):
        return {"share": share([each.split()[0] for each in wanted], [each.split()[0] for each in given])}


@mutant
class NamesMatchesAlone(Metric):
    def compute(self, wanted, given):
        found = {"share": share(wanted, given)}
        return found | ({"right": 1.0} if found["share"] == 1 else {})


@mutant
class SumsOverCalls(Metric):
    def __init__(self):
        self.right = self.asked = 0

    def compute(self, wanted, given):
        self.right += sum(map(str.__eq__, wanted, given))
        self.asked += len(wanted)
        return {"share": self.right / self.asked}


@mutant
class StripsInPlace(Metric):
    def compute(self, wanted, given):
        given[:] = [each.split(" ")[-1] for each in given]
        return {"share": share(wanted, given)}


def under_contract(made):
    class Contract(MetricContract):
        @pytest.fixture
        def factory(self):
            return made

    return Contract


for _mutant in MUTANTS:
    globals()[f"Test{_mutant.__name__}"] = under_contract(_mutant)
