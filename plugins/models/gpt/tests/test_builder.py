"""What the builder says about its model holds for the model that it builds."""

from __future__ import annotations

import pytest
import torch
from nxdt_testing.errors import raises

from nxdt_core.errors.models import BadModelConfig
from nxdt_core.models.random.init import initialize

KINDS = {
    "gpt2": {},
    "neox": {"position_embedding_type": "rope", "rotary_percentage": 0.5, "transformer_block_type": "gpt_j"},
    "grouped": {"num_kv_heads": 2, "activation": "swiglu", "normalization": "rmsnorm", "has_bias": False},
    "post_ln": {"transformer_block_type": "post_ln", "normalization": "layernorm1p", "activation": "geglu"},
    "normformer": {"transformer_block_type": "normformer", "share_embeddings_and_output_weights": False},
}
kinds = pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)


@kinds
def test_fresh_norms_are_identities_and_matrices_have_the_configured_spread(builder, changes):
    gpt = builder(**changes, init_method_std=0.1, num_layers=8)
    module = gpt.build()
    initialize(module.named_parameters(), gpt.init_rules(), seed=1)
    hidden = torch.randn(3, 48)
    normalised = (hidden - hidden.mean(-1, keepdim=True)) / hidden.std(-1, unbiased=False, keepdim=True)
    if changes.get("normalization") == "rmsnorm":
        normalised = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(module.get_submodule("layers.7.mlp_norm")(hidden), normalised, rtol=1e-3, atol=1e-3)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            writes = "o_proj" in name or "down_proj" in name
            assert parameter.std().item() == pytest.approx(0.1 / 4 if writes else 0.1, rel=0.07), name
        elif name.endswith("bias"):
            assert not parameter.any(), name


@kinds
def test_flops_follow_the_convention_of_palm(builder, changes):
    gpt = builder(**changes)
    named = gpt.build().named_parameters(remove_duplicate=False)
    multiplied = sum(p.numel() for name, p in named if p.ndim == 2 and not name.startswith("embedding"))
    assert gpt.flops_per_token(100) == 6 * multiplied + 12 * 2 * 48 * 100


def test_the_builder_states_its_bounds(builder):
    gpt = builder(max_position_embeddings=77)
    assert (gpt.max_sequence_length, gpt.vocab_size) == (77, 96)


def test_a_configuration_that_cannot_work_is_refused_whole(builder):
    with raises(BadModelConfig) as caught:
        builder(num_kv_heads=3, position_freq_base=-1.0)
    assert "num_kv_heads" in str(caught.value)
    assert "position_freq_base" in str(caught.value)
