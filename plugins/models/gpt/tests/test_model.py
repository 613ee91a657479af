"""The module by itself, beyond what :mod:`test_contract` asks of every model: kinds of layers, positions, dropout."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from nxdt_core.models.loss import cross_entropy_sum
from nxdt_core.models.random.init import initialize

ROPE = {"position_embedding_type": "rope", "rotary_percentage": 0.5}


@pytest.fixture
def fresh(builder):
    """``fresh(**changes)``: a model with weights."""

    def build(**changes):
        gpt = builder(**changes)
        module = gpt.build()
        initialize(module.named_parameters(), gpt.init_rules(), seed=1)
        return module

    return build


@pytest.mark.parametrize("kind", ["pre_ln", "post_ln", "normformer", "gpt_j"])
def test_a_layer_arranges_its_norms_as_published(fresh, kind):
    layer = fresh(transformer_block_type=kind, init_method_std=0.2).layers["0"]
    x = torch.randn(1, 5, 48)
    attention, mlp, one, two = layer.attention, layer.mlp, layer.attention_norm, layer.mlp_norm
    if kind == "pre_ln":
        y = x + attention(one(x))
        wanted = y + mlp(two(y))
    elif kind == "post_ln":
        y = one(x + attention(x))
        wanted = two(y + mlp(y))
    elif kind == "gpt_j":
        wanted = x + attention(one(x)) + mlp(two(x))
    else:
        y = x + layer.attention_output_norm(attention(one(x)))
        wanted = y + mlp.down_proj(mlp.norm(functional.gelu(mlp.up_proj(two(y)))))
    torch.testing.assert_close(layer(x), wanted)


def test_layernorm1p_scales_by_one_more_than_its_weight(fresh):
    norm = fresh(normalization="layernorm1p").layers["0"].mlp_norm
    x = torch.randn(3, 48)
    torch.testing.assert_close(norm(x), functional.layer_norm(x, (48,)))
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    torch.testing.assert_close(norm(x), functional.layer_norm(x, (48,), norm.weight + 1, norm.bias))


@pytest.mark.parametrize(
    ("name", "function"), [("geglu", functional.gelu), ("reglu", functional.relu), ("swiglu", functional.silu)]
)
def test_a_gated_block_multiplies_its_activated_gate(fresh, name, function):
    mlp = fresh(activation=name).layers["0"].mlp
    x = torch.randn(1, 5, 48)
    torch.testing.assert_close(mlp(x), mlp.down_proj(function(mlp.gate_proj(x)) * mlp.up_proj(x)))


def test_rotation_leaves_the_other_channels_alone(fresh, tokens):
    model = fresh(**ROPE)
    cos, _ = model.rotary(torch.arange(4))
    assert 2 * cos.shape[-1] == 6  # of 12
    ids = tokens(1, 9)
    assert not torch.equal(model(ids), model(ids, 3 * torch.arange(9)[None]))


def test_a_scaled_base_and_interpolated_positions_reach_the_rotation(fresh):
    angle = fresh(**ROPE).rotary.frequency
    stretched = fresh(**ROPE, positition_interpolation_factor=2.0).rotary.frequency
    torch.testing.assert_close(stretched, angle / 2)
    product = fresh(**ROPE, position_freq_base=500.0, position_abf_factor=20.0).rotary.frequency
    torch.testing.assert_close(product, angle)


@pytest.mark.parametrize("where", ["hidden_dropout", "attention_dropout", "ffn_dropout"])
def test_each_dropout_acts_in_training_alone(fresh, tokens, where):
    model, ids = fresh(**{where: 0.5}, init_method_std=0.2), tokens(1, 9)
    plain = fresh(init_method_std=0.2)
    assert torch.equal(model.eval()(ids), plain.eval()(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))


def test_it_learns(fresh, tokens):
    model = fresh(hidden_dropout=0.1, attention_dropout=0.1, ffn_dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = tokens(4, 17)
    losses = []
    torch.manual_seed(0)
    for _ in range(40):
        total, weight = cross_entropy_sum(model(ids[:, :-1]), ids[:, 1:])
        (total / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / weight).item())
    assert abs(losses[0] - torch.log(torch.tensor(96.0))) < 0.2
    assert losses[-1] < 0.5
