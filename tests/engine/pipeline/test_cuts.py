"""Automatic pipeline cuts: as short as possible, never longer than even ones, and training does not notice them."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
import torch
from nxdt_testing.errors import raises

from nxdt_core.config import load
from nxdt_core.engine.layout import LayoutOptions, part_costs, pipeline_cuts
from nxdt_core.engine.pipeline.schedules import PartCosts, choose_cuts, schedule_operations, stage_costs, step_length
from nxdt_core.engine.pipeline.split import stage_layers
from nxdt_core.errors.layouts import FewerLayersThanStages
from nxdt_core.protocols.mesh import MeshSizes, rank_of_stage
from nxdt_core.train import build
from nxdt_core.train.plan import plan
from tests.engine.matrix.layouts import Layout
from tests.engine.matrix.training import _LLAMA, train
from tests.sampling import slow

SCHEDULES = {
    "1f1b": MeshSizes(pp=4),
    "interleaved": MeshSizes(pp=2, vpp=2, schedule="interleaved"),
    "zbv": MeshSizes(pp=2, vpp=2, schedule="zbv"),
}
LARGE_VOCABULARY = {**_LLAMA, "vocab_size": 512}
"""The head costs as much as two and a half layers."""


def parts(layers, *, first=0, last=0):
    return PartCosts(layers={f"layers.{n}": cost for n, cost in enumerate(layers)}, first=first, last=last)


def costs_of(costs, cuts, stages):
    return stage_costs(costs, stage_layers(list(costs.layers), stages, cuts))


def every_cut(costs, stages):
    """Costs by stage of all cuts that leave a layer to every stage but the last."""
    names = list(costs.layers)
    for places in combinations(range(1, len(names) + 1), stages - 1):
        yield costs_of(costs, [names[place - 1] for place in places], stages)


def longest_rank(stages, sizes):
    ranks = [0] * sizes.pp
    for stage, cost in enumerate(stages):
        ranks[rank_of_stage(stage, sizes.pp, sizes.schedule)] += cost
    return max(ranks)


def drawn(seed, *, equal):
    pick = random.Random(seed)
    layer = pick.randint(2, 9)
    layers = [layer if equal else pick.randint(1, 9) for _ in range(pick.randint(4, 9))]
    return parts(layers, first=pick.choice((0, 0, 5)), last=pick.randint(0, 25))


@pytest.mark.parametrize("seed", range(12))
def test_the_longest_stage_of_any_layers_is_as_short_as_possible(seed):
    costs = drawn(seed, equal=False)
    sizes = SCHEDULES["1f1b"]
    found = costs_of(costs, choose_cuts(costs, sizes, micro_batches=64), 4)
    assert max(found) == min(map(max, every_cut(costs, 4)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(8))
def test_the_longest_rank_of_equal_layers_is_as_short_as_possible(seed, schedule):
    costs, sizes = drawn(seed, equal=True), SCHEDULES[schedule]
    found = costs_of(costs, choose_cuts(costs, sizes, micro_batches=64), 4)
    assert longest_rank(found, sizes) == min(longest_rank(stages, sizes) for stages in every_cut(costs, 4))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [4, 32])
def test_a_step_is_never_longer_than_with_equally_many_layers(schedule, micro_batches):
    sizes = SCHEDULES[schedule]
    orders = schedule_operations(schedule, sizes.pp, sizes.vpp, micro_batches)
    for seed in range(10):
        pick = random.Random(seed)
        costs = parts([pick.randint(1, 9) for _ in range(8)], last=pick.randint(0, 25))
        chosen = costs_of(costs, choose_cuts(costs, sizes, micro_batches=micro_batches), 4)
        assert step_length(orders, chosen) <= step_length(orders, costs_of(costs, None, 4))


def test_even_cuts_are_kept_where_others_are_not_faster():
    costs = parts([10] * 8, last=4)
    assert choose_cuts(costs, SCHEDULES["1f1b"], micro_batches=16) == ("layers.1", "layers.3", "layers.5")


def test_a_layer_more_is_on_the_rank_that_keeps_the_fewest_micro_batches():
    costs = parts([10] * 8, last=12)
    cuts = choose_cuts(costs, SCHEDULES["1f1b"], micro_batches=16)
    assert cuts == ("layers.1", "layers.3", "layers.6")


def test_a_head_that_is_longer_than_all_layers_has_a_rank_for_itself():
    assert choose_cuts(parts([1] * 4, last=50), MeshSizes(pp=2), micro_batches=8) == ("layers.3",)


def test_fewer_layers_than_stages_are_refused():
    with raises(FewerLayersThanStages, match="3 layers cannot fill 4 pipeline stages"):
        choose_cuts(parts([1] * 3), SCHEDULES["1f1b"], micro_batches=8)


def counted(*settings):
    config = load("recipe:mixtral-tiny" if "mixtral" in settings else "recipe:llama-tiny", settings[1:])
    builder = build.model_builder(config)
    with torch.device("meta"):
        whole = builder.build()
    options = LayoutOptions(
        seq_length=config.run.data.seq_length,
        recompute_granularity=config.run.model.activations_checkpoint_granularity,
        loss_chunk_tokens=config.run.model.loss_chunk_tokens,
    )
    return builder, part_costs(whole, builder.plan(), builder, options), config.run.data.seq_length


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_costs_are_those_of_the_estimate(model):
    """Together they are the operations of a token, of which forward and backward of each matrix are three thirds."""
    builder, costs, length = counted(model)
    total = costs.first + costs.last + sum(costs.layers.values())
    assert total == pytest.approx(3 * builder.flops_per_token(length), rel=1e-6)
    assert costs.first == 0
    assert len(set(costs.layers.values())) == 1


def test_what_backward_computes_again_counts():
    _, plain, _ = counted("llama")
    _, layers, _ = counted("llama", "model.activations_checkpoint_granularity=full")
    _, head, _ = counted("llama", "model.loss_chunk_tokens=16")
    for name, cost in plain.layers.items():
        assert layers.layers[name] * 3 == cost * 4
    assert layers.last == plain.last
    assert head.last * 3 == plain.last * 4
    assert head.layers == plain.layers


def test_named_cuts_are_taken_as_they_are():
    builder = build.model_builder(load("recipe:llama-tiny"))
    with torch.device("meta"):
        whole = builder.build()
    named = LayoutOptions(pipeline_cuts=("layers.0",))
    assert pipeline_cuts(whole, builder.plan(), builder, MeshSizes(pp=2), named) == ("layers.0",)


def test_cuts_exist_for_micro_batches_that_the_schedule_cannot_run():
    """The schedule refuses them with its own error."""
    builder = build.model_builder(load("recipe:llama-tiny"))
    with torch.device("meta"):
        whole = builder.build()
    for sizes, count in ((MeshSizes(pp=4), 1), (MeshSizes(pp=2, vpp=2, schedule="interleaved"), 5)):
        found = pipeline_cuts(whole, builder.plan(), builder, sizes, LayoutOptions(micro_batches=count))
        assert found is not None
        assert len(found) == 3


def test_the_plan_has_the_cuts_and_the_longest_rank():
    keys = ("trainer.devices=2", "distributed_strategy.pipeline_model_parallel_size=2", "model.vocab_size=4096")
    found = plan(load("recipe:llama-tiny", keys)).to_dict()
    assert found["pipeline_cuts"] == ["layers.3"]
    even = plan(load("recipe:llama-tiny", (*keys, "model.pipeline_cuts=[layers.1]"))).to_dict()
    assert 1 < found["pipeline_longest_rank"] < even["pipeline_longest_rank"]
    assert found["pipeline_bubble"] < even["pipeline_bubble"]


LAYOUTS = [Layout(pp=2), slow(Layout(pp=2, vpp=2)), slow(Layout(pp=2, zbv=True))]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_large_vocabulary_has_uneven_cuts_and_the_losses_of_one_process(ranks, alone, steps, layout):
    reports = ranks(2).run(train, layout, "float64", steps(20), LARGE_VOCABULARY, timeout_s=240)
    of_rank = [{name.split(".")[1] for name in report.weights if name.startswith("layers.")} for report in reports]
    assert sum(map(len, of_rank)) == 4
    assert len(of_rank[0]) != len(of_rank[1])
    expected = alone(layout, "float64", steps(20), LARGE_VOCABULARY)
    assert expected.losses[-1] < expected.losses[0]
    for report in reports:
        assert report.losses == pytest.approx(expected.losses, abs=1e-9, rel=0)
