"""Wrong adapters, each with one mistake that a real author could make, under the contract.

Not collected by name: ``test_adapter_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from nxdt_testing.adapter_contract import AdapterContract
from torch import nn
from torch.nn import functional

from nxdt_core.config.section import Section as BaseSection
from nxdt_core.models.updates import Update, UpdatedLinear
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.plan import InitRule

RANK, SCALE = 2, 2.0
TARGETS = ("q_proj", "o_proj")
MUTANTS = []


def mutant(cls):
    MUTANTS.append(cls)
    return cls


class Section(BaseSection):
    rank: int = RANK


class LowRank(Update):
    sharded_like: ClassVar = {"down": 1, "up": 0}

    def __init__(self, inputs, outputs):
        super().__init__()
        self.down = nn.Parameter(torch.empty(RANK, inputs))
        self.up = nn.Parameter(torch.empty(outputs, RANK))

    def forward(self, hidden, product, weight):
        low_rank = functional.linear(hidden, self.local(self.down))
        return product + SCALE * functional.linear(low_rank, self.local(self.up))


@mutant
class Right(Adapter):
    """A low-rank update of two projections of each attention."""

    saves_base = True
    update = LowRank
    scale = SCALE
    start = 0.0

    def __init__(self, section):
        self.section = section

    def apply(self, module, plan):
        module.requires_grad_(False)
        for path, part in list(module.named_modules()):
            if path.endswith(TARGETS) and isinstance(part, nn.Linear):
                self.change(module, path, part)
        return plan

    def change(self, module, path, layer):
        module.set_submodule(path, UpdatedLinear(layer, self.update(layer.in_features, layer.out_features)))

    def init_rules(self):
        return [
            InitRule(pattern="*.update.down", distribution="normal", std=0.3),
            InitRule(pattern="*.update.up", distribution="normal" if self.start else "constant", std=self.start),
        ]

    def begin(self, model, config, ranks):
        pass

    def check_resume(self, saved, where):
        if saved["rank"] != self.section.rank:
            raise ValueError(where)

    def finish(self, checkpoint, config, ranks):
        pass

    def merge(self, weights):
        merged = dict(weights)
        for name in [name for name in weights if name.endswith(".update.down")]:
            owner = name.removesuffix(".update.down")
            down, up = merged.pop(f"{owner}.update.down"), merged.pop(f"{owner}.update.up")
            merged[f"{owner}.weight"] = weights[f"{owner}.weight"] + self.scale * (up @ down)
        return merged


@mutant
class InheritsNothing:
    def __init__(self, *arguments):
        self.right = Right(*arguments)

    def __getattr__(self, name):
        return getattr(self.right, name)


class Renamed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.scale, self.eps = norm.weight, norm.eps

    def forward(self, hidden):
        return functional.rms_norm(hidden, hidden.shape[-1:], self.scale, self.eps)


@mutant
class RenamesTheBase(Right):
    def apply(self, module, plan):
        module.norm = Renamed(module.norm)
        return super().apply(module, plan)


@mutant
class AllocatesAtOnce(Right):
    def change(self, module, path, layer):
        with torch.device("cpu"):
            super().change(module, path, layer)


@mutant
class LeavesNormsTrained(Right):
    def apply(self, module, plan):
        plan = super().apply(module, plan)
        module.norm.requires_grad_(True)
        return plan


@mutant
class HasNoRuleForOne(Right):
    def init_rules(self):
        return super().init_rules()[:1]


@mutant
class StartsElsewhere(Right):
    start = 0.1


@mutant
class HasAnIdlePart(Right):
    class update(LowRank):
        def forward(self, hidden, product, weight):
            low_rank = functional.linear(hidden, self.local(self.down).detach())
            return product + SCALE * functional.linear(low_rank, self.local(self.up))


@mutant
class WritesIntoTheBase(Right):
    class update(LowRank):
        def forward(self, hidden, product, weight):
            if self.training:
                weight.data.mul_(0.999)
            return super().forward(hidden, product, weight)


@mutant
class GrowsItsScale(Right):
    class update(LowRank):
        calls = 0

        def forward(self, hidden, product, weight):
            if self.training:
                self.calls += 1
            return product + (1 + self.calls) * (super().forward(hidden, product, weight) - product)

    def merge(self, weights):
        calls = 16
        right, self.scale = self.scale, (1 + calls) * self.scale
        try:
            return super().merge(weights)
        finally:
            self.scale = right


@mutant
class UpdatesInTrainingAlone(Right):
    class update(LowRank):
        def forward(self, hidden, product, weight):
            return super().forward(hidden, product, weight) if self.training else product


@mutant
class ComparesAnotherKey(Right):
    def check_resume(self, saved, where):
        if saved.get("lora_rank") != self.section.rank:
            raise ValueError(f"{where} has another rank")


@mutant
class MergesWithoutItsScale(Right):
    scale = 1.0


@mutant
class FollowsNothing(Right):
    class update(LowRank):
        sharded_like: ClassVar = {}


def under_contract(cls):
    class Contract(AdapterContract):
        name = "right"

        @pytest.fixture
        def factory(self):
            return cls

        @pytest.fixture
        def section(self):
            return Section()

        @pytest.fixture
        def merged(self):
            return lambda adapter, weights: adapter.merge(weights)

    return Contract


for _mutant in MUTANTS:
    globals()[f"Test{_mutant.__name__}"] = under_contract(_mutant)
