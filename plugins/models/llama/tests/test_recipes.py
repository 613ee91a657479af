"""The recipes load, and hold what they promise."""

from __future__ import annotations

from importlib.resources import files

import pytest
import torch
from nxdt_plugin_llama.builder import LlamaBuilder

from nxdt_core.config import load
from nxdt_core.errors import NxdtError
from nxdt_core.training import assemble

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


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "ffn", "heads", "weights"),
    [("llama3-8b", 32, 4096, 14336, 32, 8_030_261_248), ("llama3-70b", 80, 8192, 28672, 64, 70_553_706_496)],
)
def test_the_llama_3_recipes_have_the_released_shapes(name, layers, hidden, ffn, heads, weights):
    config = load(f"recipe:{name}")
    model = config.selected("model").config
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (layers, hidden, ffn)
    assert (model.num_attention_heads, model.kv_heads, model.vocab_size) == (heads, 8, 128256)
    assert (model.rope_theta, model.max_position_embeddings, config.run.data.seq_length) == (500_000, 8192, 8192)
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in LlamaBuilder(model).build().parameters()) == weights


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b"])
def test_training_a_llama_3_recipe_says_what_must_be_set(name):
    with pytest.raises(NxdtError, match=r"data\.tokenizer\.model"):
        assemble.tokenizer(load(f"recipe:{name}"))
    config = load(f"recipe:{name}", ["data.tokenizer.library=byte", "data.tokenizer.model=null"])
    with pytest.raises(NxdtError, match=r"data\.train_files"):
        assemble.dataloader(config, assemble.tokenizer(config)).split("train")
