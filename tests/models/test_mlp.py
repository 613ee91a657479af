"""The gated feed-forward block."""

from __future__ import annotations

import torch

from nxdt_core.models.mlp import SwiGLU


def test_swiglu_is_its_formula():
    torch.manual_seed(0)
    mlp, x = SwiGLU(8, 12), torch.randn(2, 3, 8)
    gate, up = x @ mlp.gate_proj.weight.t(), x @ mlp.up_proj.weight.t()
    torch.testing.assert_close(mlp(x), (gate * torch.sigmoid(gate) * up) @ mlp.down_proj.weight.t())


def test_it_has_no_biases():
    assert {name for name, _ in SwiGLU(8, 12).named_parameters()} == {
        "gate_proj.weight",
        "up_proj.weight",
        "down_proj.weight",
    }
