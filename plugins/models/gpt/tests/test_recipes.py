"""What the recipes promise beyond what ``tests/recipes`` asks of every recipe."""

from __future__ import annotations

import pytest

from nxdt_core.config import load


def test_the_tiny_recipe_can_be_cut_in_any_layout_of_8_processes():
    config = load("recipe:gpt-tiny")
    model, data = config.selected("model").config, config.run.data
    assert (model.num_layers, model.num_attention_heads) == (4, 4)
    assert model.vocab_rows % 16 == model.ffn_size % 16 == data.seq_length % 16 == 0
    assert data.global_batch_size % (8 * data.micro_batch_size) == 0
    assert config.run.precision.type == "fp32"


@pytest.mark.parametrize("name", ["gpt-6.7b", "gpt-6.7b-trn1", "gpt-6.7b-trn2"])
def test_the_large_recipes_have_the_shape_of_nxd_trainings_example(name):
    model = load(f"recipe:{name}").selected("model").config
    assert (model.num_layers, model.hidden_size, model.ffn_size, model.num_attention_heads) == (32, 4096, 16384, 32)
    assert (model.hidden_dropout, model.attention_dropout, model.ffn_dropout) == (0.1, 0.1, 0.1)
    assert model.vocab_rows == 50264  # 50,257 filled up to a multiple of 8


@pytest.mark.parametrize("name", ["gpt-6.7b", "gpt-6.7b-trn1", "gpt-6.7b-trn2"])
def test_the_large_recipes_read_what_nxd_trainings_example_reads(name):
    data, tokenizer = (load(f"recipe:{name}").selected(slot) for slot in ("dataset", "tokenizer"))
    assert data.component.record.name == "megatron-data"
    assert data.config.splits_string == "980,10,10"
    assert not any((data.config.reset_position_ids, data.config.reset_attention_mask, data.config.eod_mask_loss))
    assert tokenizer.config.vocab_file.name == "gpt2-vocab.json"
    assert tokenizer.config.merge_file.name == "gpt2-merges.txt"
