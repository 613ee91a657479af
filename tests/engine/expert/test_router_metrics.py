"""What a step reports of its routers, against their own statistics; layouts are compared in the matrices."""

from __future__ import annotations

import math

import pytest
import torch
from nxdt_testing.runs.moe import MoEBuilder
from nxdt_testing.runs.moe_config import MoEConfig, MoEModelConfig
from torch import nn

from nxdt_core.engine.expert import RouterMetrics, routers_of
from nxdt_core.engine.recompute import apply_recompute
from nxdt_core.models.moe.router import TopKRouter
from nxdt_core.models.random.init import initialize
from nxdt_core.protocols.plan import ParallelPlan

NAMES = {"expert_load_max", "expert_load_layer_max", "expert_load_min", "dropped_tokens", "router_entropy"}


def small(capacity_factor=0.75):
    builder = MoEBuilder(MoEModelConfig(moe=MoEConfig(capacity_factor=capacity_factor)))
    model = builder.build()
    initialize(model.named_parameters(), builder.init_rules(), seed=2)
    return model, builder.plan()


def micro_batches():
    return torch.randint(64, (3, 2, 12), generator=torch.Generator().manual_seed(0))


def figures_of(model, plan, batches, *, backward=True):
    metrics = RouterMetrics(routers_of(model, plan), [model], device=batches.device, dtype=torch.float32)
    with metrics.counting():
        for tokens in batches:
            loss = model(tokens).square().mean()
            if backward:
                loss.backward()
    return metrics.metrics(metrics.sums)


def by_definition(model, batches):
    """From a forward pass of each micro-batch by itself."""
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    assigned, dropped, entropies = torch.zeros(len(routers), 4), 0, []
    for tokens in batches:
        model(tokens)
        for layer, router in enumerate(routers):
            assigned[layer] += router.statistics.assigned
            dropped += router.statistics.dropped.item()
            entropies.append(router.statistics.entropy.item() / tokens.numel())
    loads = assigned / assigned.mean(1, keepdim=True)
    return {
        "expert_load_max": loads.max().item(),
        "expert_load_layer_max": loads.max(1).values.mean().item(),
        "expert_load_min": loads.min().item(),
        "dropped_tokens": dropped / assigned.sum().item(),
        "router_entropy": sum(entropies) / len(entropies),
    }


def test_the_figures_of_several_micro_batches_are_those_of_their_definition():
    model, plan = small()
    found, expected = figures_of(model, plan, micro_batches()), by_definition(model, micro_batches())
    assert found.keys() == expected.keys() == NAMES
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected, rel=1e-5)
    assert 0 < found["dropped_tokens"] < 0.5
    assert found["expert_load_min"] < 1 < found["expert_load_layer_max"] < found["expert_load_max"]
    assert 0 < found["router_entropy"] < math.log(4)


@pytest.mark.parametrize("names", [(), ("MixtureOfExperts",)], ids=["layers", "mixtures"])
def test_what_is_recomputed_is_counted_once(names):
    model, plan = small()
    expected = figures_of(model, plan, micro_batches())
    metrics = RouterMetrics(routers_of(model, plan), [model], device=torch.device("cpu"), dtype=torch.float32)
    apply_recompute(model, plan, granularity="selective" if names else "full", names=names)
    with metrics.counting():
        for tokens in micro_batches():
            model(tokens).square().mean().backward()
    assert metrics.sums[:, -1].tolist() == [3 * 24, 3 * 24]
    assert metrics.metrics(metrics.sums) == expected


def test_every_step_counts_from_zero():
    model, plan = small()
    metrics = RouterMetrics(routers_of(model, plan), [model], device=torch.device("cpu"), dtype=torch.float32)
    for _ in range(2):
        with metrics.counting():
            model(micro_batches()[0])
        assert metrics.sums[:, :-3].sum(1).tolist() == [24 * 2, 24 * 2]
    model(micro_batches()[0])
    assert metrics.sums[0, -1] == 24


def test_nothing_asks_the_device_for_a_number():
    """The meta device has none to give."""
    with torch.device("meta"):
        model, plan = MoEBuilder(MoEModelConfig()).build(), MoEBuilder(MoEModelConfig()).plan()
    found = figures_of(model, plan, micro_batches().to("meta"), backward=False)
    assert all(value.is_meta and not value.shape for value in found.values())


def test_layers_may_have_different_numbers_of_experts():
    metrics = RouterMetrics({"a": 4, "b": 2}, [], device=torch.device("cpu"), dtype=torch.float32)
    sums = torch.tensor([[1, 2, 3, 2, 1, 4.0, 4], [3, 5, 0, 0, 1, 2.0, 4]])  # no expert of b has the last two
    found = {name: value.item() for name, value in metrics.metrics(sums).items()}
    expected = {
        "expert_load_max": 1.5,
        "expert_load_layer_max": (1.5 + 1.25) / 2,
        "expert_load_min": 0.5,
        "dropped_tokens": 2 / 16,
        "router_entropy": 0.75,
    }
    assert found == pytest.approx(expected)


def test_a_model_without_routers_reports_nothing():
    model = nn.Linear(2, 2)
    assert routers_of(model, ParallelPlan()) == {}
    assert figures_of(model, ParallelPlan(), torch.zeros(1, 2, 2)) == {}
