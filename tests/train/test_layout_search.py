"""``nxdt plan --search``: it finds what trying everything finds, and says why it finds nothing."""

import itertools

import pytest
from nxdt_testing.errors import raises

from nxdt_core.config import load
from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.launch import NoLayoutFits, NoTimesOfDevice
from nxdt_core.train.plan import candidates, plan, search

STRATEGY = "distributed_strategy"
WORLD = ("trainer.devices=4", "precision.type=autocast", "model.num_layers=2")
LARGE = (*WORLD, "data.micro_batch_size=100000", "data.global_batch_size=400000")
"""More activations than an H100 has memory for, unless they are recomputed or shared."""


def loader(recipe, *settings):
    return lambda more: load(recipe, (*settings, *more))


@pytest.fixture(scope="module")
def found():
    return search(loader("recipe:llama-tiny", *LARGE), product="h100")


def every_layout_that_fits():
    """Seconds per step of all combinations, from plans of each."""
    sizes = itertools.product((1, 2, 4), (1, 2), (1, 3), ("null", "full"), ("false", "true"))
    for tp, pp, zero_stage, recompute, regather in sizes:
        settings = (
            f"{STRATEGY}.tensor_model_parallel_size={tp}",
            f"{STRATEGY}.pipeline_model_parallel_size={pp}",
            f"{STRATEGY}.sequence_parallel={str(tp > 1).lower()}",
            f"{STRATEGY}.sequence_parallel_regather={regather}",
            f"{STRATEGY}.zero_stage={zero_stage}",
            f"model.activations_checkpoint_granularity={recompute}",
        )
        try:
            made = plan(load("recipe:llama-tiny", (*LARGE, *settings)), product="h100")
        except NxdtError:
            continue
        if made.fits and not made.tight:
            yield made.step_time.total


@pytest.mark.slow
def test_the_first_is_the_fastest_of_all_that_fit(found):
    everything = sorted(every_layout_that_fits())
    times = [each.seconds for each in found.ranked]
    assert found.as_configured.fits is False
    assert times == sorted(times)
    assert times[0] == everything[0]
    assert set(times) <= set(everything)
    assert any("full" in each.settings.values() for each in found.ranked)


def test_the_settings_select_the_layout_that_was_estimated(found):
    best = found.ranked[0]
    settings = [f"{key}={value}" for key, value in best.settings.items()]
    again = plan(load("recipe:llama-tiny", (*LARGE, *settings)), product="H100")
    assert again.to_dict() == best.plan.to_dict()


def test_sizes_are_tried_that_the_run_allows():
    layouts = list(
        candidates(load("recipe:llama-tiny", (*WORLD, "data.seq_length=32768", "model.max_position_embeddings=32768")))
    )
    assert {layout.tp for layout in layouts} == {1, 2, 4}
    assert {layout.cp for layout in layouts} == {1, 2, 4}
    assert {layout.ep for layout in layouts} == {1}
    assert all(4 % layout.ranks == 0 for layout in layouts)
    experts = list(candidates(load("recipe:mixtral-tiny", WORLD)))
    assert {layout.ep for layout in experts} == {1, 2, 4}


def test_more_than_any_layout_holds_is_refused():
    with raises(NoLayoutFits) as caught:
        search(
            loader(
                "recipe:llama-tiny",
                *("data.micro_batch_size=100000", "data.global_batch_size=100000", "model.hidden_size=1024"),
            ),
            product="h100",
        )
    assert "layouts leaves a tenth of the memory of H100 free" in str(caught.value)


def test_a_product_without_known_links_is_refused():
    with raises(NoTimesOfDevice, match=r"on trn2 in bfloat16"):
        search(loader("recipe:llama-tiny", "precision.type=autocast"), product="trn2")
