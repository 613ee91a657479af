"""The recipes load, and hold what they promise."""

from __future__ import annotations

from importlib.resources import files

import pytest
import torch
from nxdt_plugin_llama.builder import LlamaBuilder

from nxdt_core.config import load

RECIPES = sorted(path.name for path in files("nxdt_plugin_llama").joinpath("recipes").iterdir())


def test_there_are_recipes():
    assert {"llama-tiny.yaml", "llama-small.yaml"} <= set(RECIPES)


@pytest.mark.parametrize("file", RECIPES)
def test_a_recipe_loads_without_arguments_and_its_model_is_built(file):
    config = load(f"recipe:{file.removesuffix('.yaml')}")
    builder = LlamaBuilder(config.selected("model").config)
    assert config.run.data.seq_length <= builder.max_sequence_length
    with torch.device("meta"):  # the largest has 70e9 weights
        assert builder.build().lm_head.weight.shape[0] == builder.vocab_size
    assert config.run.model.optim.sched.max_steps == config.run.trainer.max_steps
    assert file.removesuffix(".yaml") == config.run.name


@pytest.mark.parametrize("file", RECIPES)
def test_a_recipe_begins_with_its_summary(file):
    first = files("nxdt_plugin_llama").joinpath("recipes", file).read_text().partition("\n")[0]
    assert first.startswith("# ")
    assert len(first) < 140


def test_the_tiny_recipe_can_be_cut_in_any_layout_of_8_processes():
    config = load("recipe:llama-tiny")
    model, data = config.selected("model").config, config.run.data
    assert config.run.trainer.max_steps == 40
    assert (model.num_layers, model.num_attention_heads, model.kv_heads) == (4, 4, 2)
    assert model.vocab_size % 16 == model.ffn_hidden_size % 16 == data.seq_length % 16 == 0
    assert data.global_batch_size // data.micro_batch_size >= 8
    assert data.global_batch_size % (8 * data.micro_batch_size) == 0
    assert config.run.precision.type == "fp32"
    assert not model.share_embeddings_and_output_weights
