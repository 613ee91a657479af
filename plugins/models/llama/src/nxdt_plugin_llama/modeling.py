"""The module: a rotary decoder of this family's layers. Plain torch, nothing parallel."""

from __future__ import annotations

import torch
from torch import nn

from nxdt_core.nn.attention.documents import DocumentMasks
from nxdt_core.nn.attention.grouped_query import CausalAttention, GroupedQueryAttention
from nxdt_core.nn.decoder import RotaryDecoder
from nxdt_core.nn.mlp import SwiGLU
from nxdt_core.nn.norm import RMSNorm
from nxdt_core.nn.rotary import LinearScaling, Llama3Scaling, RotaryEmbedding, RotaryScaling
from nxdt_plugin_llama.config import LlamaConfig, RopeScalingConfig

__all__ = ["Llama", "LlamaDecoderLayer"]


class Llama(RotaryDecoder):
    """Touvron et al. 2023 (arXiv:2302.13971) with the changes of Llama 2 and 3 (arXiv:2407.21783); with a window, the
    model of Jiang et al. 2023 (arXiv:2310.06825)."""

    def __init__(self, config: LlamaConfig) -> None:
        masks = DocumentMasks()
        super().__init__(
            (LlamaDecoderLayer(config, masks) for _ in range(config.num_layers)),
            RotaryEmbedding(config.head_size, theta=config.rope_theta, scaling=_scaling(config.rope_scaling)),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            epsilon=config.layernorm_epsilon,
            tied=config.share_embeddings_and_output_weights,
        )


class LlamaDecoderLayer(nn.Module):
    """Attention and feed-forward block, each normalised before and added to the residual stream."""

    def __init__(self, config: LlamaConfig, masks: DocumentMasks) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.attention = GroupedQueryAttention(
            config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_size,
            core=CausalAttention(masks, window=config.window),
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.mlp = SwiGLU(config.hidden_size, config.ffn_hidden_size)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``hidden`` [batch, seq, hidden] to the same shape."""
        hidden = hidden + self.attention(self.attention_norm(hidden), rotary, document_ids)
        transformed: torch.Tensor = self.mlp(self.mlp_norm(hidden))
        return hidden + transformed


def _scaling(config: RopeScalingConfig | None) -> RotaryScaling | None:
    """The scaling that a checked section describes."""
    if config is None or config.kind == "default":
        return None
    assert config.factor is not None
    if config.kind == "linear":
        return LinearScaling(factor=config.factor)
    assert config.low_freq_factor is not None
    assert config.high_freq_factor is not None
    assert config.original_max_position_embeddings is not None
    return Llama3Scaling(
        factor=config.factor,
        low_freq_factor=config.low_freq_factor,
        high_freq_factor=config.high_freq_factor,
        original_max_position_embeddings=config.original_max_position_embeddings,
    )
