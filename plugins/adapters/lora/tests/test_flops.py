"""What a token costs where the base is frozen, derived by hand."""

import pytest

from nxdt_core.run.callbacks.metrics import token_flops
from nxdt_core.train import build

LAYER = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 40
HEAD = 60 * 32


@pytest.mark.parametrize(
    ("adapter", "trained", "added"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, 0, 2 * 4 * ((32 + 32) + (32 + 16))),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, HEAD, 2 * 4 * (32 + 32)),
    ],
    ids=["frozen", "trained head"],
)
def test_strict_counts_frozen_weights_without_their_gradients(start, adapter, trained, added):
    run = start("llama", adapter)
    found = token_flops(run.builder, 16, build.adapters(run.config))
    weights = 2 * LAYER + HEAD
    assert found.palm == 6 * weights + 12 * 2 * 32 * 16
    assert found.strict == pytest.approx(4 * (weights - trained) + 6 * (trained + added) + 12 * 2 * 32 * 17 / 2)
