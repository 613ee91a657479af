"""Wrong optimizers, each with one mistake that a real author could make, under the contract.

Not collected by name: ``test_optimizer_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

import pytest
import torch
from nxdt_testing.optimizer_contract import OptimizerContract

from nxdt_core.config.section import Section as BaseSection
from nxdt_core.distributed.collectives import gather_shard
from nxdt_core.protocols.optimizer import as_torch, shards_of
from nxdt_core.protocols.tensor_shards import TensorSlice

MUTANTS = []


def mutant(cls):
    MUTANTS.append(cls)
    return cls


class Section(BaseSection):
    lr: float = 0.01
    weight_decay: float = 0.1


@mutant
class Right(torch.optim.Optimizer):
    """Momentum and decoupled decay; the others say in what they differ."""

    def __init__(self, groups, config):
        super().__init__(as_torch(groups), {"lr": config.lr})
        self.config = config

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, group)

    def update(self, weight, group):
        momentum = self.momentum(weight).mul_(0.9).add_(weight.grad)
        weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(momentum, alpha=group["lr"])

    def momentum(self, weight):
        return self.state[weight].setdefault("momentum", torch.zeros_like(weight))


@mutant
class MakesAGroupOfItsOwn(Right):
    def __init__(self, groups, config):
        one = {"params": [each for group in groups for each in group["params"]], "names": []}
        super().__init__([{**groups[0], **one}], config)


@mutant
class StepsTheFirstGroupAlone(Right):
    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None:
                self.update(weight, self.param_groups[0])


@mutant
class MovesWithoutAGradient(Right):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                self.update(weight, group)


@mutant
class TakesTheRateOfTheSection(Right):
    def update(self, weight, group):
        super().update(weight, {**group, "lr": self.config.lr})


@mutant
class DecaysAllAlike(Right):
    def update(self, weight, group):
        super().update(weight, {**group, "weight_decay": self.config.weight_decay})


@mutant
class LosesDigitsInADifference(Right):
    def momentum(self, weight):
        momentum = super().momentum(weight)
        return momentum.add_(1e6).sub_(1e6)


@mutant
class CountsItsSteps(Right):
    taken = 0

    def step(self, closure=None):
        self.taken += 1
        super().step(closure)

    def update(self, weight, group):
        super().update(weight, {**group, "lr": group["lr"] / self.taken})


@mutant
class KeepsMomentumInAList(Right):
    def __init__(self, groups, config):
        super().__init__(groups, config)
        self.kept = {id(weight): torch.zeros_like(weight) for group in groups for weight in group["params"]}

    def momentum(self, weight):
        return self.kept[id(weight)]


@mutant
class KeepsAListAsState(Right):
    def update(self, weight, group):
        self.state[weight].setdefault("shape", [*weight.shape])
        super().update(weight, group)


@mutant
class AsksForTheLargestElement(Right):
    def update(self, weight, group):
        weight.grad.div_(weight.grad.abs().max().clamp(min=100) / 100)
        super().update(weight, group)


@mutant
class DividesByTheNormOfItsShard(Right):
    def update(self, weight, group):
        super().update(weight, {**group, "lr": group["lr"] / (1 + float(weight.norm()))})


@mutant
class KeepsANumberForEachRowOfItsShard(Right):
    def update(self, weight, group):
        square = weight.grad.square()
        square = square.mean(-1, keepdim=True) if weight.dim() > 1 else square
        rows = self.state[weight].setdefault("rows", torch.zeros_like(square).reshape(-1, 1, 1))
        rows.mul_(0.9).add_(square.reshape(-1, 1, 1), alpha=0.1)
        size = rows.reshape(square.shape).sqrt() + 1e-6
        weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(weight.grad / size, alpha=group["lr"])


@mutant
class KeepsTheGradientItself(Right):
    """Adds the change since the last gradient, which it keeps without a copy."""

    def update(self, weight, group):
        before = self.state[weight].get("gradient")
        change = 0 if before is None else weight.grad - before
        self.state[weight]["gradient"] = weight.grad
        weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(weight.grad + 0.1 * change, alpha=group["lr"])


class Normed(Right):
    """Divides each update by the norm of the whole gradient, in any layout."""

    def __init__(self, groups, config):
        super().__init__(groups, config)
        self.shards = shards_of(groups)

    def update(self, weight, group):
        shard = self.shards[weight]
        square = shard.real(weight.grad).square().sum()
        for over in self.summed_over(shard):
            torch.distributed.all_reduce(square, group=over)
        super().update(weight, {**group, "lr": group["lr"] / (1 + float(square.sqrt()))})

    def summed_over(self, shard):
        return shard.groups


@mutant
class SumsOverTheInnermostGroup(Normed):
    def summed_over(self, shard):
        return shard.groups[-1:]


@mutant
class SumsOverTheOutermostGroup(Normed):
    def summed_over(self, shard):
        return shard.groups[:1]


@mutant
class LeavesRanksWithoutAGradientOut(Normed):
    hangs_s = 15.0

    def update(self, weight, group):
        if weight.grad.any():
            super().update(weight, group)


@mutant
class MakesUpdatesOrthogonal(Right):
    """As Muon, by Newton-Schulz steps in bfloat16 on whole matrices: right, with the tolerance that this needs."""

    rtol = 0.05

    def __init__(self, groups, config):
        super().__init__(groups, config)
        self.shards = shards_of(groups)

    def update(self, weight, group):
        shard = self.shards[weight]
        if not shard.matrix:
            super().update(weight, group)
            return
        momentum = self.momentum(weight).mul_(0.9).add_(weight.grad)
        whole = gather_shard(momentum, shard).bfloat16()
        whole = whole / whole.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
        for _ in range(2):
            whole = 1.5 * whole - 0.5 * whole @ whole.mT @ whole
        update = whole.to(weight.dtype)[shard.region.within(TensorSlice.whole(shard.shape))]
        shard.real(weight).mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])


def under_contract(made):
    class Contract(OptimizerContract):
        sharded = True
        rtol = getattr(made, "rtol", OptimizerContract.rtol)
        hangs_s = getattr(made, "hangs_s", OptimizerContract.hangs_s)

        @pytest.fixture
        def factory(self):
            return made

        @pytest.fixture
        def section(self):
            return Section()

    return type(f"Test{made.__name__}", (Contract,), {})


for _mutant in MUTANTS:
    globals()[f"Test{_mutant.__name__}"] = under_contract(_mutant)
