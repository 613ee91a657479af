"""What the builder says about its model holds for the model that it builds."""

from __future__ import annotations

import pytest
import torch
from nxdt_testing.errors import raises

from nxdt_core.errors.models import BadModelConfig
from nxdt_core.models.random.init import initialize


def test_styles_fit_the_modules(builder):
    llama = builder()
    module, plan = llama.build(), llama.plan()
    styles = {
        style: {path.rpartition(".")[2] for path, s in plan.tensor.items() if s == style}
        for style in set(plan.tensor.values())
    }
    assert styles == {
        "vocab_embedding": {"embed_tokens"},
        "column": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"},
        "row": {"o_proj", "down_proj"},
        "vocab_head": {"lm_head"},
    }
    assert plan.heads.query_heads == 4
    assert plan.heads.kv_heads == 2
    assert isinstance(module.get_submodule("layers.1.attention.core"), torch.nn.Module)


def test_a_pipeline_may_cut_between_layers_with_global_numbers(builder):
    llama = builder(num_layers=3)
    module, pipeline = llama.build(), llama.plan().pipeline
    assert list(module.get_submodule(pipeline.layers)) == ["0", "1", "2"]
    parts = {*pipeline.first, pipeline.layers, *pipeline.last}
    assert {name.split(".")[0] for name, _ in module.named_parameters()} == parts


def test_names_to_recompute_are_those_of_nxd_training(builder):
    assert set(builder().plan().recompute) == {
        "CoreAttention",
        "LlamaMLP",
        "ActivationMultiplyMLP",
        "LlamaRMSNorm",
        "LlamaDecoderLayer",
    }


@pytest.mark.parametrize("scaled", [False, True])
def test_fresh_weights_have_the_configured_spread(builder, scaled):
    llama = builder(init_method_std=0.1, use_scaled_init_method=scaled, num_layers=8)
    module = llama.build()
    initialize(module.named_parameters(), llama.init_rules(), seed=1)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        writes = scaled and ("o_proj" in name or "down_proj" in name)
        assert parameter.std().item() == pytest.approx(0.1 / 4 if writes else 0.1, rel=0.06), name


def test_flops_follow_the_convention_of_palm(builder):
    llama = builder()
    multiplied = sum(p.numel() for name, p in llama.build().named_parameters() if p.ndim == 2 and "embed" not in name)
    assert llama.flops_per_token(100) == 6 * multiplied + 12 * 2 * 4 * 12 * 100


def test_flops_of_llama_3_8b_are_those_that_others_state(builder):
    llama = builder(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_kv_heads=8,
        vocab_size=128256,
    )
    parameters = 8_030_261_248  # of the released model
    without_embedding = parameters - 128256 * 4096
    assert llama.flops_per_token(8192) == pytest.approx(6 * without_embedding + 12 * 32 * 4096 * 8192, rel=1e-4)


def test_the_builder_states_its_bounds(builder):
    llama = builder(max_position_embeddings=77)
    assert llama.max_sequence_length == 77
    assert llama.vocab_size == 96


def test_a_configuration_that_cannot_work_is_refused_whole(builder):
    with raises(BadModelConfig) as caught:
        builder(num_kv_heads=3, rope_theta=-1.0)
    assert "num_kv_heads" in str(caught.value)
    assert "rope_theta" in str(caught.value)
