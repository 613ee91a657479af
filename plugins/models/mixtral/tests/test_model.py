"""The module by itself, beyond what :mod:`test_contract` asks of every model: windows, dropouts, tying, learning."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from nxdt_core.engine.layout import set_dropout_salts
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.models.loss import cross_entropy_sum
from nxdt_core.models.random.init import initialize
from nxdt_core.models.step_boundary import at_step_boundary
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.step_context import StepContext


@pytest.fixture
def model(builder):
    mixtral = builder()
    module = mixtral.build()
    initialize(module.named_parameters(), mixtral.init_rules(), seed=1)
    return module


def test_a_window_hides_what_lies_before_it(builder, tokens):
    mixtral = builder(num_layers=1, sliding_window=4)
    module = mixtral.build()
    initialize(module.named_parameters(), mixtral.init_rules(), seed=1)
    ids = tokens(1, 12)
    changed = ids.clone()
    changed[0, 5] += 1
    # The changed token changes the sizes of the experts' groups, so kernels may round other rows differently (6e-8).
    difference = (module(ids) - module(changed)).abs().amax(-1)[0]
    sees = torch.tensor([False] * 5 + [True] * 4 + [False] * 3)
    assert difference[~sees].max() < 1e-6
    assert difference[sees].min() > 1e-3


def test_dropout_of_the_mixture_is_in_its_experts_and_not_in_attention(builder, tokens):
    mixtral = builder(moe={"dropout": 0.5})
    module = mixtral.build()
    initialize(module.named_parameters(), mixtral.init_rules(), seed=1)
    outputs = {True: [], False: []}
    layer = module.layers["0"]
    layer.attention.register_forward_hook(lambda _, __, output: outputs[module.training].append(output.detach()))
    layer.moe.register_forward_hook(lambda _, __, output: outputs[module.training].append(output.detach()))
    for training in (True, False):
        module.train(training)(tokens(2, 9))
    (attended, mixed), (attended_whole, mixed_whole) = outputs[True], outputs[False]
    assert torch.equal(attended, attended_whole)
    assert (mixed != mixed_whole).any(-1).all()
    assert layer.attention.core.semantics().causal
    assert module.layers["1"].moe.experts.dropout.p == 0.5


@pytest.mark.parametrize(("moe", "balanced"), [({}, True), ({"output_router_logits": False}, False)], ids=str)
def test_without_router_logits_nothing_balances(builder, tokens, moe, balanced):
    mixtral = builder(moe={"router_aux_loss_coef": 0.5, **moe})
    gradients = []
    for scale in (0.0, 1.0):
        module = mixtral.build()
        initialize(module.named_parameters(), mixtral.init_rules(), seed=1)
        with at_step_boundary(StepContext(aux_loss_scale=scale)):
            module(tokens(2, 9)).square().mean().backward()
        gradients.append(module.layers["1"].moe.router.weight.grad)
    assert torch.equal(*gradients) is not balanced


def test_every_rank_that_computes_parts_of_experts_drops_otherwise(builder):
    mixtral = builder(moe={"dropout": 0.1})
    salts = set()
    for rank in range(4):
        module = mixtral.build()
        mesh = ParallelMesh(MeshSizes(dp_shard=2, tp=2, ep=2), None, rank=rank)
        set_dropout_salts(module, mixtral.plan(), mesh, sequence_parallel=False)
        salts |= {layer.moe.experts.dropout.salt for layer in module.layers.values()}
    assert len(salts) == 4 * 2


def test_a_tied_head_is_one_parameter_that_gets_both_gradients(builder, tokens):
    mixtral = builder(share_embeddings_and_output_weights=True)
    module = mixtral.build()
    initialize(module.named_parameters(), mixtral.init_rules(), seed=1)
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
    mixtral = builder()
    module = mixtral.build()
    initialize(module.named_parameters(), mixtral.init_rules(), seed=1)
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
