"""Losses on preferences follow one process in every layout, and each sample meets its own reference anywhere."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from tests.engine.layouts.preferring import FLOAT64, OBJECTIVES, STEPS, STRATEGY, differences, follow
from tests.sampling import sampled

ZERO3 = f"{STRATEGY}zero_stage=3"
TP2 = f"{STRATEGY}tensor_model_parallel_size=2"
LAYOUTS = {
    "dp2": (),
    "dp2-zero3": (ZERO3,),
    "tp2-sp": (TP2, f"{STRATEGY}sequence_parallel=true"),
    "tp2-chunked": (TP2, "model.loss_chunk_tokens=32"),
    "pp2": (f"{STRATEGY}pipeline_model_parallel_size=2",),
    "cp2": (f"{STRATEGY}context_parallel_size=2",),
}
APART = ("data.dev_choose_samples=7",)
TOGETHER = ("data.dev_choose_samples=10", "data.seq_length=128", *FLOAT64)
"""Ten pairs, which three samples of three pairs and one of one hold; all of them are one global batch."""
COUNTS = {"kto": ("data.dev_choose_samples=5",)}
"""So many are ten answers."""
ADAPTED = (
    *("adapter.name=lora", "adapter.lora_dropout=0", "objective.precompute_ref_log_probs=false"),
    *(*TOGETHER, "data.packing=true"),
)
"""The reference of each step is the frozen base."""
MIXTRAL = {
    "name": "mixtral",
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 16,
    "moe": {"num_experts": 4, "dropless": True, "router_aux_loss_coef": 0.1},
}
EXPERTS = {
    "dp2": (),
    "ep2": (f"{STRATEGY}expert_model_parallel_size=2",),
    "ep2-zero3": (f"{STRATEGY}expert_model_parallel_size=2", ZERO3),
    "tp2-sp": LAYOUTS["tp2-sp"],
    "pp2": LAYOUTS["pp2"],
    "cp2": LAYOUTS["cp2"],
}
CASES = [case for case in product(LAYOUTS, OBJECTIVES) if case != ("tp2-chunked", "reward")]
"""A head of scores has no losses that could be computed some tokens at a time."""
SAMPLE = 2


def pytest_generate_tests(metafunc):
    if "of_experts" in metafunc.fixturenames:
        cases = sampled(metafunc.config, product(EXPERTS, ("dpo", "orpo")), SAMPLE, default=[("ep2", "dpo")])
        metafunc.parametrize(("of_experts", "objective"), cases)
    if "adapted" in metafunc.fixturenames:
        default = [("tp2-sp", "dpo"), ("pp2", "kto")]
        cases = sampled(metafunc.config, product(LAYOUTS, ("dpo", "kto")), SAMPLE, default=default)
        metafunc.parametrize(("adapted", "objective"), cases)
    if "layout" in metafunc.fixturenames:
        apart = [("cp2", "orpo"), ("dp2", "kto"), ("tp2-sp", "simpo"), ("tp2-sp", "reward"), ("pp2", "reward")]
        packed = [("cp2", "dpo"), ("pp2", "kto"), ("tp2-chunked", "ipo"), ("cp2", "reward")]
        default = packed if "padded" in metafunc.fixturenames else apart
        cases = sampled(metafunc.config, CASES, SAMPLE, default=default)
        metafunc.parametrize(("layout", "objective"), cases)


@pytest.fixture(scope="module")
def alone(ranks):
    """``alone(objective)``: what one process sees."""
    one = (*APART, "data.micro_batch_size=4")
    return cache(lambda objective: ranks(1).run(follow, objective, 1, one)[0])


@pytest.fixture(scope="module")
def padded(ranks):
    """``padded(objective)``: what one process sees of pairs that are not packed."""
    one = (*TOGETHER, "data.global_batch_size=10", "data.micro_batch_size=10")

    @cache
    def of(objective):
        (found,) = ranks(1).run(follow, objective, 1, (*one, *COUNTS.get(objective, ())))
        assert sum(gradient.abs().sum() for gradient in found.gradients.values()) > 1
        return found

    return of


def test_every_layout_follows_one_process(ranks, alone, layout, objective):
    wanted = alone(objective)
    validated = [4, 4, 4, 2] if objective == "kto" else [4, 3]  # of seven pairs
    assert [row.get("weight") for row in wanted.rows] == [None, None, None, *validated]
    found = ranks(2).run(follow, objective, 2, (*APART, *LAYOUTS[layout]))
    assert not differences(found, wanted, close=2e-5)


def test_before_the_first_step_no_pair_is_preferred_to_its_reference(alone):
    first, *later = alone("dpo").rows[:STEPS]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert later[-1]["rewards/margins"] > 0.01


@pytest.mark.slow  # by default, in a layout below
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_packed_pairs_train_as_padded_ones_do(ranks, padded, objective, micro):
    more = (*TOGETHER, "data.packing=true", f"data.micro_batch_size={micro}", *COUNTS.get(objective, ()))
    (found,) = ranks(1).run(follow, objective, 1, more)
    assert (found.samples, padded(objective).samples) == (4, 10)
    assert not differences([found], padded(objective), close=1e-9)


def test_packed_pairs_train_in_every_layout_as_padded_ones_do_in_one_process(ranks, padded, layout, objective):
    more = (*TOGETHER, "data.packing=true", *LAYOUTS[layout], *COUNTS.get(objective, ()))
    found = ranks(2).run(follow, objective, 2, more)
    assert (found[0].samples, padded(objective).samples) == (4, 10)
    assert not differences(found, padded(objective), close=1e-9)


@pytest.fixture(scope="module")
def with_frozen_base(ranks):
    return cache(lambda objective: ranks(1).run(follow, objective, 1, (*ADAPTED, *COUNTS.get(objective, ())))[0])


def test_the_frozen_base_is_the_reference_in_every_layout(ranks, with_frozen_base, adapted, objective):
    wanted = with_frozen_base(objective)
    assert all("lora" in name for name in wanted.gradients)
    assert wanted.rows[STEPS - 1]["rewards/margins"] > 1e-3
    more = (*ADAPTED, *LAYOUTS[adapted], *COUNTS.get(objective, ()))
    assert not differences(ranks(2).run(follow, objective, 2, more), wanted, close=1e-9)


def test_a_frozen_base_is_what_was_computed_before(ranks, with_frozen_base):
    (kept,) = ranks(1).run(follow, "dpo", 1, (*ADAPTED, "objective.precompute_ref_log_probs=true"))
    alone = with_frozen_base("dpo")
    asked = replace(alone, rows=[dict(row) for row in alone.rows])
    for found in (asked, kept):
        del found.rows[0]["rewards/accuracies"]  # of answers that are as likely as their reference but for rounding
    assert not differences([asked], kept, close=1e-6)  # what is kept has 32 bits


def test_pairs_train_experts_in_every_layout(ranks, of_experts, objective):
    packed = (*TOGETHER, "data.packing=true")
    (wanted,) = ranks(1).run(follow, objective, 1, packed, MIXTRAL)
    found = ranks(2).run(follow, objective, 2, (*packed, *EXPERTS[of_experts]), MIXTRAL)
    assert not differences(found, wanted, close=1e-9)


@pytest.mark.slow  # by default, the mask of a pair alone
def test_padding_of_pairs_goes_to_no_expert(ranks):
    """The same pairs in one micro-batch, packed or each with its padding, balance the experts alike."""
    together = ("data.packing=true", "data.micro_batch_size=4")
    apart = ("data.global_batch_size=10", "data.micro_batch_size=10")
    wanted, found = (ranks(1).run(follow, "dpo", 1, (*TOGETHER, *each), MIXTRAL) for each in (together, apart))
    assert not differences(found, wanted[0], close=1e-9)
