"""What the recipes promise beyond what ``tests/recipes`` asks of every recipe."""

from __future__ import annotations

import pytest

from nxdt_core.config import load
from nxdt_core.errors import NxdtError
from nxdt_core.train import build


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


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b"])
def test_training_a_llama_3_recipe_says_what_must_be_set(name):
    with pytest.raises(NxdtError, match=r"data\.tokenizer\.model"):
        build.tokenizer(load(f"recipe:{name}"))
    config = load(f"recipe:{name}", ["data.tokenizer.library=byte"])
    with pytest.raises(NxdtError, match=r"data\.train_files"):
        build.dataset(config, build.tokenizer(config)).split("train")
