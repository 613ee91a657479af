"""A plain module with parallel layers trains in each layout as plain torch trains it in one process."""

import pytest

from nxdt_core.testing.ranks import RankPool
from tests.primitives import loops
from tests.primitives.loops import in_plain_torch, with_the_api
from tests.sampling import slow, slow_except

PIPELINE = {"num_microbatches": loops.MICRO, "transformer_layer_cls": loops.Layer}

LAYOUTS = {
    "tp2": (2, {"tensor_parallel_size": 2}, {}),
    "tp2-tied": (2, {"tensor_parallel_size": 2}, {"tied": True}),
    "pp2": (2, {"pipeline_parallel_size": 2, "pipeline_config": PIPELINE}, {}),
    "pp2-tied": (2, {"pipeline_parallel_size": 2, "pipeline_config": PIPELINE}, {"tied": True}),
    "pp2-virtual": (
        2,
        {"pipeline_parallel_size": 2, "pipeline_config": {**PIPELINE, "virtual_pipeline_size": 2}},
        {},
    ),
    "zero1": (2, {"zero": True}, {}),
    "dp2": (2, {}, {}),
    "recompute": (1, {"activation_checkpoint_config": "full"}, {}),
    "tp2-sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}, {"whole": False}),
    "kv-copies": (4, {"tensor_parallel_size": 4}, {"kv_size_multiplier": 2}),
    "tp2-pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_config": PIPELINE}, {}),
    "tp2-pp2-zero1": (
        4,
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_config": PIPELINE, "zero": True},
        {},
    ),
}


def assert_equal(outcomes, reference, *, mean_loss=False):
    losses, norms, weights = reference
    for rank, (own_losses, own_norms, own) in enumerate(outcomes):
        if not mean_loss:
            assert own_losses == pytest.approx(losses, abs=1e-9), rank
        assert own_norms == pytest.approx(norms, abs=1e-9), rank
        for name, value in own.items():
            assert (value - weights[name]).abs().max() < 1e-9, (rank, name)
    assert {name for *_, own in outcomes for name in own} == weights.keys() - {"places"}


DEFAULT = {"pp2-virtual", "tp2-sp", "recompute", "tp2-pp2-zero1"}


@pytest.mark.parametrize("name", slow_except(LAYOUTS, DEFAULT))
def test_training_equals_plain_torch(name):
    size, config, options = LAYOUTS[name]
    outcomes = RankPool(size).run(with_the_api, config, options)
    assert_equal(outcomes, in_plain_torch(**options))


@pytest.mark.parametrize("name", [slow("tp2"), "zero1", slow("dp2")])
def test_forward_and_backward_of_the_callers_own_equal_plain_torch(name):
    size, config, options = LAYOUTS[name]
    outcomes = RankPool(size).run(with_the_api, config, options, True)
    assert_equal(outcomes, in_plain_torch(**options), mean_loss=name != "tp2")
