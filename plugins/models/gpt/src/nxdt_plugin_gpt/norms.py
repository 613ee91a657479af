"""The three normalisations of Megatron's models by their names there."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.models.norm import RMSNorm
from nxdt_plugin_gpt.config import GPTConfig

__all__ = ["LayerNorm1P", "norm_of"]


class LayerNorm1P(nn.LayerNorm):
    """Layer norm whose ``weight`` is the scale's difference from one."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise ``hidden`` [..., size]."""
        return functional.layer_norm(hidden, self.normalized_shape, self.weight + 1, self.bias, self.eps)


def norm_of(config: GPTConfig, size: int) -> nn.Module:
    """Return the configured norm over the last dimension, of ``size``."""
    if config.normalization == "rmsnorm":
        return RMSNorm(size, config.layernorm_epsilon)
    kind = LayerNorm1P if config.normalization == "layernorm1p" else nn.LayerNorm
    return kind(size, config.layernorm_epsilon)
