"""A checkpoint that the first version wrote (``format_1/``, in the repository) loads for ever, value by value."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from nxdt_core.checkpoint import (
    CheckpointFacts,
    find_checkpoint,
    list_checkpoints,
    load_model,
    load_optimizer,
    load_state,
    open_storage,
    verify,
)


def test_the_first_format_loads() -> None:
    store = open_storage(str(Path(__file__).with_name("format_1")))
    assert [(status.step, status.state) for status in list_checkpoints(store)] == [(2, "committed")]
    assert verify(store, 2) == []
    manifest = find_checkpoint(store, None, warn=pytest.fail)
    assert manifest.facts == CheckpointFacts(
        consumed_samples=16,
        consumed_tokens=1024,
        config={"run": {"name": "golden"}},
        plugin_fingerprint="f",
        mesh={"tp": 1},
        metrics={"loss": 2.5},
        versions={"nxdt-core": "0.1.0"},
    )
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    model = load_model(store, manifest)
    assert torch.equal(model["embed.weight"], weight)
    assert model["head.weight"] is model["embed.weight"]
    assert torch.equal(model["norm"], torch.tensor([1.5, -2.0]).bfloat16())
    optimizer = load_optimizer(store, manifest)
    assert torch.equal(optimizer["embed.weight/exp_avg"], weight * 2)
    assert torch.equal(optimizer["embed.weight/step"], torch.tensor(2))
    state = load_state(store, manifest)
    assert math.isnan(state.pop("nan"))
    assert torch.equal(state.pop("rng")["torch"], torch.arange(4, dtype=torch.uint8))
    assert state == {"position": 16, "pair": (1, {0: "zero"})}
