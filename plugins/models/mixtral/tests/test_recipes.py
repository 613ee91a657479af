"""The recipes load, and hold what they promise."""

from __future__ import annotations

from importlib.resources import files

import pytest
import torch
from nxdt_plugin_mixtral.builder import MixtralBuilder

from nxdt_core.config import load

RECIPES = sorted(path.name for path in files("nxdt_plugin_mixtral").joinpath("recipes").iterdir())


def test_there_are_recipes():
    assert "mixtral-tiny.yaml" in RECIPES


@pytest.mark.parametrize("file", RECIPES)
def test_a_recipe_loads_without_arguments_and_its_model_is_built(file):
    config = load(f"recipe:{file.removesuffix('.yaml')}")
    builder = MixtralBuilder(config.selected("model").config)
    assert config.run.data.seq_length <= builder.max_sequence_length
    with torch.device("meta"):  # the largest has 47e9 weights
        assert builder.build().lm_head.weight.shape[0] == builder.vocab_size
    assert config.run.model.optim.sched.max_steps == config.run.trainer.max_steps
    assert file.removesuffix(".yaml") == config.run.name


@pytest.mark.parametrize("file", RECIPES)
def test_a_recipe_begins_with_its_summary(file):
    first = files("nxdt_plugin_mixtral").joinpath("recipes", file).read_text().partition("\n")[0]
    assert first.startswith("# ")
    assert len(first) < 140


def test_the_tiny_recipe_can_be_cut_in_any_layout_of_8_processes():
    config = load("recipe:mixtral-tiny")
    model, data = config.selected("model").config, config.run.data
    assert config.run.trainer.max_steps == 40
    assert (model.num_layers, model.num_attention_heads, model.kv_heads) == (4, 4, 2)
    assert (model.moe.num_experts, model.moe.top_k) == (4, 2)
    assert model.vocab_size % 16 == model.ffn_hidden_size % 16 == data.seq_length % 16 == 0
    assert data.global_batch_size % (8 * data.micro_batch_size) == 0
    assert config.run.precision.type == "fp32"


LARGE = [file.removesuffix(".yaml") for file in RECIPES if file != "mixtral-tiny.yaml"]


def test_there_is_a_layout_of_each_kind_with_and_without_dropping():
    assert set(LARGE) == {f"mixtral-8x7b{how}{where}" for how in ("", "-dropless") for where in ("", "-trn1", "-trn2")}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_recipe_has_the_released_shape_and_says_what_it_drops(name):
    config = load(f"recipe:{name}")
    model = config.selected("model").config
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (32, 4096, 14336)
    assert (model.num_attention_heads, model.kv_heads, model.vocab_size) == (32, 8, 32000)
    assert (model.rope_theta, model.max_position_embeddings, config.run.data.seq_length) == (1_000_000, 32768, 4096)
    assert (model.moe.capacity, model.moe.dropless) == ((None, True) if "dropless" in name else (2.0, False))
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in MixtralBuilder(model).build().parameters()) == 46_702_792_704
