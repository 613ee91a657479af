"""Pipelines over real processes train as one process does, in float64: all schedules, tied embeddings, ZeRO stages."""

from dataclasses import replace

import pytest
from nxdt_testing.ranks import process_group

from tests.engine.pipeline import mutants
from tests.engine.pipeline.cases import Case, compare, pipeline, train, trained
from tests.sampling import slow, slow_except, takes_all

SCHEDULES = ("1f1b", "interleaved", "zbv")

TWO_RANKS = [
    *(slow(Case(schedule=schedule)) for schedule in SCHEDULES),
    *slow_except(TIED := [Case(schedule=schedule, tied=True, steps=20) for schedule in SCHEDULES], TIED[1:2]),
    *slow_except(AUX := [Case(schedule=schedule, aux=True) for schedule in SCHEDULES], AUX[2:]),
    slow(Case(schedule="1f1b", recompute="full")),
    slow(Case(schedule="interleaved", recompute="full")),
    Case(schedule="zbv", recompute="full"),
    Case(micro_batches=7),
    slow(Case(schedule="zbv", micro_batches=1)),
    slow(Case(schedule="zbv", micro_batches=5)),
    slow(Case(schedule="interleaved", micro_batches=3)),
    slow(Case(cuts=("layers.0",))),
    Case(cuts=("layers.3",), tied=True),
    slow(Case(schedule="interleaved", cuts=("layers.0", "layers.1", "layers.3"))),
]


@pytest.fixture(scope="session")
def ranks(new_ranks):
    return new_ranks


@pytest.fixture
def shortened(pytestconfig):
    """Take two steps, unless all samples are taken: plain gradient descent has no state that a third could show."""
    return lambda case: case if takes_all(pytestconfig) else replace(case, steps=2)


@pytest.mark.parametrize("case", TWO_RANKS, ids=str)
def test_two_ranks_train_as_one_process(ranks, shortened, case):
    case = shortened(case)
    compare(case, ranks(2).run(train, case))


ZERO = [Case(schedule=schedule, dp_shard=2, zero_stage=stage) for schedule in SCHEDULES for stage in (1, 2, 3)]
FOUR_RANKS = [
    # Each schedule and each stage once, but 1F1B with ZeRO-1: that is in the streaming tests with another schedule.
    *slow_except(ZERO, ZERO[4::4]),
    slow(Case(schedule="1f1b", dp_shard=2, zero_stage=1, tied=True, steps=20)),
    slow(Case(schedule="interleaved", dp_shard=2, zero_stage=1, tied=True, steps=20)),
    slow(Case(schedule="zbv", dp_shard=2, zero_stage=1, tied=True, steps=20)),
    slow(Case(dp_shard=2, zero_stage=3, tied=True, steps=20)),
    slow(Case(schedule="zbv", dp_shard=2, zero_stage=3, steps=20)),
    slow(Case(schedule="1f1b", dp_replicate=2, zero_stage=3)),
    slow(Case(schedule="interleaved", dp_replicate=2, zero_stage=3)),
    slow(Case(schedule="zbv", dp_replicate=2, zero_stage=3)),
    Case(pp=4, tied=True, steps=20),
]


@pytest.mark.parametrize("case", FOUR_RANKS, ids=str)
def test_four_ranks_with_sharded_data_parallelism_train_as_one_process(ranks, shortened, case):
    case = shortened(case)
    compare(case, ranks(4).run(train, case))


def train_wrongly(case, mutant):
    with process_group():
        getattr(mutants, mutant)()
        return trained(case, pipeline(case))


@pytest.mark.parametrize(
    ("mutant", "case"),
    [
        ("divide_gradients_by_micro_batches", Case(steps=1)),
        slow("divide_gradients_by_micro_batches", Case(schedule="zbv", steps=1)),
        slow("leave_tied_gradients_apart", Case(tied=True, steps=1)),
        ("leave_tied_gradients_apart", Case(schedule="zbv", tied=True, steps=1)),
        ("drop_a_layer", Case(steps=1)),
    ],
    ids=str,
)
def test_the_comparison_finds_what_is_wrong(ranks, mutant, case):
    results = ranks(2).run(train_wrongly, case, mutant)
    with pytest.raises(AssertionError):
        compare(case, results)
