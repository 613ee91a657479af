"""Against the Mixtral block of transformers: softmax, top 2, normalised."""

from __future__ import annotations

import torch

from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.moe.layer import MixtureOfExperts
from nxdt_core.models.moe.router import TopKRouter


def test_outputs_and_gradients_are_those_of_mixtral():
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    theirs = MixtralSparseMoeBlock(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = MixtureOfExperts(router=TopKRouter(16, 4, top_k=2, normalize=True), experts=SwiGLUExperts(16, 24, 4))
    gate, up = theirs.experts.gate_up_proj.chunk(2, dim=1)
    pairs = {
        "router.weight": theirs.gate.weight,
        "experts.gate_proj": gate,
        "experts.up_proj": up,
        "experts.down_proj": theirs.experts.down_proj,
    }
    ours.load_state_dict({name: value.detach() for name, value in pairs.items()})
    hidden = torch.randn(2, 9, 16)
    mine, yours = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    output, expected = ours(mine), theirs(yours)
    torch.testing.assert_close(output, expected)
    grad = torch.randn_like(hidden)
    output.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(mine.grad, yours.grad)
    torch.testing.assert_close(ours.router.weight.grad, theirs.gate.weight.grad)
    both = torch.cat((ours.experts.gate_proj.grad, ours.experts.up_proj.grad), dim=1)
    torch.testing.assert_close(both, theirs.experts.gate_up_proj.grad)
    torch.testing.assert_close(ours.experts.down_proj.grad, theirs.experts.down_proj.grad)
