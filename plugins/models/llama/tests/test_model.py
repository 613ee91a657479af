"""The module by itself, beyond what :mod:`test_contract` asks of every model: tying, learning, bfloat16."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from nxdt_core.models.loss import cross_entropy_sum
from nxdt_core.models.random.init import initialize


@pytest.fixture
def model(builder):
    llama = builder()
    module = llama.build()
    initialize(module.named_parameters(), llama.init_rules(), seed=1)
    return module


def test_a_tied_head_is_one_parameter_that_gets_both_gradients(builder, tokens):
    llama = builder(share_embeddings_and_output_weights=True)
    module = llama.build()
    initialize(module.named_parameters(), llama.init_rules(), seed=1)
    assert module.lm_head.weight is module.embed_tokens.weight
    assert "lm_head.weight" not in dict(module.named_parameters())
    apart = copy.deepcopy(module)
    apart.lm_head.weight = nn.Parameter(module.lm_head.weight.detach().clone())
    ids = tokens(1, 6)
    for m in (module, apart):
        m(ids).square().sum().backward()
    torch.testing.assert_close(
        module.embed_tokens.weight.grad, apart.embed_tokens.weight.grad + apart.lm_head.weight.grad
    )


def test_it_learns(builder, tokens):
    llama = builder()
    module = llama.build()
    initialize(module.named_parameters(), llama.init_rules(), seed=1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    ids = tokens(4, 17)
    losses = []
    for _ in range(30):
        total, weight = cross_entropy_sum(module(ids[:, :-1]), ids[:, 1:])
        (total / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / weight).item())
    assert abs(losses[0] - torch.log(torch.tensor(96.0))) < 0.1
    assert losses[-1] < 0.5


def test_bfloat16_weights_compute_near_the_same(model, tokens):
    ids = tokens(1, 8)
    expected = model(ids)
    torch.testing.assert_close(model.to(torch.bfloat16)(ids).float(), expected, rtol=0.05, atol=0.05)
