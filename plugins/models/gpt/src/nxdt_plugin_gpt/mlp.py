"""The feed-forward block: plain or gated, with or without biases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.models.random.dropout import Dropout
from nxdt_core.protocols.step_context import StepContext
from nxdt_plugin_gpt.architecture import Activation
from nxdt_plugin_gpt.config import GPTConfig
from nxdt_plugin_gpt.norms import norm_of

__all__ = ["FeedForward"]

_FUNCTIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "geglu": functional.gelu,
    "reglu": functional.relu,
    "swiglu": functional.silu,
}


class _Activation(nn.Module):
    """A separate module, so that it can be recomputed alone."""

    def __init__(self, name: Activation) -> None:
        super().__init__()
        self.function = _FUNCTIONS[name]

    def forward(self, up: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """``function(up)``, or ``function(gate) * up``; all [..., ffn_hidden_size]."""
        return self.function(up) if gate is None else self.function(gate) * up


class FeedForward(nn.Module):
    """``down(activation(up(x)))`` or ``down(activation(gate(x)) * up(x))``; in a NormFormer the activation's output is
    normalised."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.ffn_size, config.has_bias
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        if config.gated:
            self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.gated = config.gated
        self.activation = _Activation(config.activation)
        self.dropout = Dropout(config.ffn_dropout)
        self.norm = norm_of(config, inner) if config.transformer_block_type == "normformer" else None
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, hidden: torch.Tensor, step: StepContext | None = None) -> torch.Tensor:
        """``hidden`` [batch, seq, hidden] to the same shape."""
        inputs = (self.up_proj(hidden), self.gate_proj(hidden)) if self.gated else (self.up_proj(hidden),)
        inner = self.dropout(self.activation(*inputs), step)
        if self.norm is not None:
            inner = self.norm(inner)
        down: torch.Tensor = self.down_proj(inner)
        return down
