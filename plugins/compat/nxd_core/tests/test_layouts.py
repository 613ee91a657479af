"""A plain module with parallel layers trains in each layout as plain torch trains it in one process."""

import pytest

from plugins.compat.nxd_core.tests import loops
from plugins.compat.nxd_core.tests.loops import in_plain_torch, with_the_api
from tests.calls import Call, run_in_turn
from tests.sampling import asked, slow, slow_except

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


DEFAULT = {"pp2-virtual", "tp2-sp", "recompute"}
"""The cases of four ranks combine what these and ``zero1`` show one by one."""


@pytest.fixture(scope="module")
def trained(request):
    """What each rank returned, by layout and by whether the caller calls forward; layouts of a size share ranks."""
    named = [(name, False) for name in asked(request, "name")] + [(name, True) for name in asked(request, "own")]
    calls = {}
    for name, own in named:
        size, config, more = LAYOUTS[name]
        calls[name, own] = Call(size, with_the_api, (config, more, own))
    return run_in_turn(calls, timeout_s=60 * len(calls))


@pytest.mark.parametrize("name", slow_except(LAYOUTS, DEFAULT))
def test_training_equals_plain_torch(trained, name):
    assert_equal(trained[name, False], in_plain_torch(**LAYOUTS[name][2]))


@pytest.mark.parametrize("own", [slow("tp2"), "zero1", slow("dp2")])
def test_forward_and_backward_of_the_callers_own_equal_plain_torch(trained, own):
    assert_equal(trained[own, True], in_plain_torch(**LAYOUTS[own][2]), mean_loss=own != "tp2")
