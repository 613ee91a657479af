"""What the builder says about its model holds for the model that it builds."""

from __future__ import annotations

import pytest
import torch
from nxdt_testing.errors import raises

from nxdt_core.errors.models import BadModelConfig, NoHFForm
from nxdt_core.models.random.init import initialize


def test_layers_without_experts_have_a_feed_forward_block(builder):
    module = builder(num_layers=4, moe={"frequency": 2}).build()
    assert [hasattr(layer, "moe") for layer in module.layers.values()] == [False, True, False, True]
    assert [hasattr(layer, "mlp") for layer in module.layers.values()] == [True, False, True, False]


def test_names_to_recompute_are_those_of_nxd_training(builder):
    assert set(builder().plan().recompute) == {
        "ActivationMultiplyMLP",
        "CoreAttention",
        "LlamaMLP",
        "MixtralDecoderLayer",
        "MixtralRMSNorm",
    }


@pytest.mark.parametrize("scaled", [False, True])
def test_fresh_weights_have_the_configured_spread(builder, scaled):
    mixtral = builder(init_method_std=0.1, use_scaled_init_method=scaled, num_layers=8, moe={"frequency": 2})
    module = mixtral.build()
    initialize(module.named_parameters(), mixtral.init_rules(), seed=1)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        writes = scaled and ("o_proj" in name or "down_proj" in name)
        assert parameter.std().item() == pytest.approx(0.1 / 4 if writes else 0.1, rel=0.15), name


def test_flops_count_the_experts_that_a_token_meets(builder):
    mixtral = builder(num_layers=4, moe={"num_experts": 4, "top_k": 3, "frequency": 2})
    multiplied = 0.0
    for name, parameter in mixtral.build().named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            multiplied += parameter.numel() * (3 / 4 if ".experts." in name else 1)
    assert mixtral.flops_per_token(100) == 6 * multiplied + 12 * 4 * 4 * 12 * 100


def test_flops_count_what_the_window_shows(builder):
    windowed, unbounded = builder(sliding_window=20), builder()
    assert windowed.flops_per_token(20) == unbounded.flops_per_token(20)
    assert windowed.flops_per_token(50) == unbounded.flops_per_token(20)


def test_flops_of_mixtral_8x7b_are_those_of_its_active_parameters(builder):
    mixtral = builder(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_kv_heads=8,
        vocab_size=32000,
        moe={"num_experts": 8},
    )
    active = 12.88e9 - 32000 * 4096  # 12.9e9 (arXiv:2401.04088, table 1), without the embedding
    assert mixtral.flops_per_token(4096) == pytest.approx(6 * active + 12 * 32 * 4096 * 4096, rel=1e-3)


def test_the_builder_states_its_bounds(builder):
    mixtral = builder(max_position_embeddings=77)
    assert mixtral.max_sequence_length == 77
    assert mixtral.vocab_size == 96


def test_a_configuration_that_cannot_work_is_refused_whole(builder):
    with raises(BadModelConfig) as caught:
        builder(num_kv_heads=3, moe={"top_k": 5})
    assert "num_kv_heads" in str(caught.value)
    assert "moe.top_k" in str(caught.value)


@pytest.mark.parametrize(
    ("moe", "key"),
    [
        ({"frequency": 2}, "frequency"),
        ({"normalize_top_k_affinities": False}, "affinities"),
        ({"routing_algorithm": "sinkhorn", "top_k": 1, "normalize_top_k_affinities": False}, "sinkhorn"),
    ],
    ids=str,
)
def test_a_model_that_transformers_would_compute_otherwise_is_not_exported(builder, moe, key):
    with raises(NoHFForm, match=key) as caught:
        builder(moe=moe).config_to_hf()
    assert caught.value.code == "NXDT-M070"
