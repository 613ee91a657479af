"""A plugin whose optimizers, schedules and objective keep state that no checkpoint sees, and some that do not."""

import random
import time

import torch

from nxdt_core.api import Component, hookimpl
from nxdt_core.config.section import Section as BaseSection
from nxdt_core.protocols.objective import Objective, ObjectiveOutput
from nxdt_core.protocols.optimizer import as_torch


class Rate(BaseSection):
    lr: float = 1e-3


class Plain(torch.optim.SGD):
    """Constants, a cache of what the parameters are, and momentum in its place."""

    def __init__(self, groups, config):
        super().__init__(as_torch(groups), lr=config.lr, momentum=0.9)
        self.note, self.sizes, self.config = "constant", torch.ones(3), config
        self.by_parameter = {parameter: parameter for group in self.param_groups for parameter in group["params"]}


class Counting(Plain):
    """Anneals by a number of its own."""

    def __init__(self, groups, config):
        super().__init__(groups, config)
        self.taken = 0

    def step(self, closure=None):
        self.taken += 1
        for group in self.param_groups:
            group["lr"] *= 0.9**self.taken
        return super().step(closure)


class Slow(Plain):
    """A second copy of the weights in a list of an object of its own."""

    class Copies:
        def __init__(self, parameters):
            self.weights = [parameter.detach().clone() for parameter in parameters]

    def __init__(self, groups, config):
        super().__init__(groups, config)
        self.copies = self.Copies(parameter for group in groups for parameter in group["params"])

    def step(self, closure=None):
        super().step(closure)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        torch._foreach_lerp_(self.copies.weights, [parameter.detach() for parameter in parameters], 0.5)


class InGroups(Plain):
    """As optimizers without a schedule do: a number in each group."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


class UnderAName(Plain):
    """State under a name instead of a parameter."""

    def step(self, closure=None):
        self.state["all"] = {"mean": torch.ones(())}
        return super().step(closure)


class Looked(Plain):
    """Counts who reads its attributes."""

    class Counter(dict):
        count = 0

        def items(self):
            self.count += 1
            return super().items()

    def __init__(self, groups, config):
        super().__init__(groups, config)
        self.looked_at = self.Counter()


class OwnGenerator(Plain):
    """Random numbers of a generator of its own."""

    def __init__(self, groups, config):
        super().__init__(groups, config)
        self.generator = torch.Generator().manual_seed(1)

    def step(self, closure=None):
        torch.rand((), generator=self.generator)
        return super().step(closure)


def counted(config, horizon):
    calls = []

    def factor(step):
        calls.append(step)
        return 1 / len(calls)

    return factor


def timed(config, horizon):
    began = time.perf_counter()
    return lambda step: 1 / (1 + time.perf_counter() - began)


def drawn(config, horizon):
    return lambda step: random.random()


def pure(config, horizon):
    known = {}
    return lambda step: known.setdefault(step, 1 / (1 + step))


class Tracking(Objective):
    """Weighs the loss by a running mean of its own."""

    def __init__(self, config):
        self.mean = torch.ones(())

    def weight(self, batch):
        return batch.weight()

    def __call__(self, logits, batch):
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        self.mean = self.mean.lerp(loss.detach(), 0.5)
        return ObjectiveOutput(loss_sum=loss, weight=batch.weight())


@hookimpl
def nxdt_optimizers():
    kinds = (Plain, Counting, Slow, InGroups, UnderAName, OwnGenerator, Looked)
    config = f"{__name__}:Rate"
    return [Component(name=kind.__name__, target=f"{__name__}:{kind.__name__}", config=config) for kind in kinds]


@hookimpl
def nxdt_schedules():
    return [Component(name=name, target=f"{__name__}:{name}") for name in ("counted", "timed", "drawn", "pure")]


@hookimpl
def nxdt_objectives():
    return [Component(name="tracking", target=f"{__name__}:Tracking")]
