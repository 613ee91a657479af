"""What holds of this plugin's recipes beyond what ``tests/recipes`` asks of all."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from nxdt_core.config import load
from nxdt_core.train.plan import plan

RECIPES = sorted(path.name for path in Path(str(files("nxdt_plugin_mixtral"))).glob("recipes/**/*.yaml"))


def test_the_tiny_recipe_can_be_cut_in_any_layout_of_8_processes():
    config = load("recipe:mixtral-tiny")
    model, data = config.selected("model").config, config.run.data
    assert config.run.trainer.max_steps == 40
    assert (model.num_layers, model.num_attention_heads, model.kv_heads) == (4, 4, 2)
    assert (model.moe.num_experts, model.moe.top_k) == (4, 2)
    assert model.vocab_size % 16 == model.ffn_hidden_size % 16 == data.seq_length % 16 == 0
    assert data.global_batch_size % (8 * data.micro_batch_size) == 0
    assert config.run.precision.type == "fp32"


@pytest.mark.parametrize("tp", [1, 2])
def test_a_plan_tells_what_mixing_tokens_sends(tp):
    strategy = f"token_shuffle_group_size: 4, tensor_model_parallel_size: {tp}, sequence_parallel: {tp > 1}"
    keys = [f"trainer.devices={4 * tp}", f"distributed_strategy={{{strategy}}}", "model.moe.capacity_factor=1.0"]
    (rank, *_) = plan(load("recipe:mixtral-tiny", keys)).estimate.ranks
    hidden_bytes = 2 * 128 * 64 * 4 / tp  # of a micro-batch; each rank exchanges its part of the sequence alone
    times = 4 * 2 * 2 * 2  # layers, there and back, forward and backward, micro-batches
    assert rank.sent["token_shuffle"] == hidden_bytes * times * 3 / 4
    assert "other" not in rank.sent


LARGE = [file.removesuffix(".yaml") for file in RECIPES if file != "mixtral-tiny.yaml"]


def test_there_is_a_layout_of_each_kind_with_and_without_dropping():
    kinds = {f"{how}{where}" for how in ("", "-dropless") for where in ("", "-trn1", "-trn2")}
    assert set(LARGE) == {f"mixtral-{size}{kind}" for size in ("8x7b", "8x22b") for kind in kinds}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_recipe_says_what_it_drops(name):
    config = load(f"recipe:{name}")
    moe = config.selected("model").config.moe
    assert (moe.capacity, moe.dropless) == ((None, True) if "dropless" in name else (2.0, False))
    assert config.run.data.seq_length == 4096
