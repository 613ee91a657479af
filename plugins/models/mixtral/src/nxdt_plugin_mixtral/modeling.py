"""The module: a rotary decoder of this family's layers. Plain torch, nothing parallel."""

from __future__ import annotations

import torch
from torch import nn

from nxdt_core.nn.attention.documents import DocumentMasks
from nxdt_core.nn.attention.grouped_query import CausalAttention, GroupedQueryAttention
from nxdt_core.nn.decoder import RotaryDecoder
from nxdt_core.nn.mlp import SwiGLU
from nxdt_core.nn.moe.experts import SwiGLUExperts
from nxdt_core.nn.moe.layer import MixtureOfExperts
from nxdt_core.nn.moe.router import TopKRouter
from nxdt_core.nn.moe.sinkhorn import SinkhornRouter
from nxdt_core.nn.norm import RMSNorm
from nxdt_core.nn.rotary import RotaryEmbedding
from nxdt_plugin_mixtral.config import MixtralConfig

__all__ = ["Mixtral", "MixtralDecoderLayer"]


class Mixtral(RotaryDecoder):
    """Jiang et al. 2024 (arXiv:2401.04088)."""

    def __init__(self, config: MixtralConfig) -> None:
        masks = DocumentMasks()
        super().__init__(
            (
                MixtralDecoderLayer(config, masks, sparse=number in config.expert_layers)
                for number in range(config.num_layers)
            ),
            RotaryEmbedding(config.head_size, theta=config.rope_theta),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            epsilon=config.layernorm_epsilon,
            tied=config.share_embeddings_and_output_weights,
        )


class MixtralDecoderLayer(nn.Module):
    """Attention and feed-forward block, each normalised before and added to the residual stream.

    The block is ``moe``, or ``mlp`` in a layer without experts (``moe.frequency`` above 1).
    """

    def __init__(self, config: MixtralConfig, masks: DocumentMasks, *, sparse: bool = True) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.attention = GroupedQueryAttention(
            config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_size,
            core=CausalAttention(masks, window=config.sliding_window),
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.sparse = sparse
        if sparse:
            self.moe = _mixture(config)
        else:
            self.mlp = SwiGLU(config.hidden_size, config.ffn_hidden_size)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``hidden`` [batch, seq, hidden] to the same shape."""
        hidden = hidden + self.attention(self.attention_norm(hidden), rotary, document_ids)
        block = self.moe if self.sparse else self.mlp
        transformed: torch.Tensor = block(self.mlp_norm(hidden))
        return hidden + transformed


def _mixture(config: MixtralConfig) -> MixtureOfExperts:
    moe = config.moe
    experts = SwiGLUExperts(config.hidden_size, config.ffn_hidden_size, moe.num_experts, dropout=moe.dropout)
    return MixtureOfExperts(router=_router(config), experts=experts)


def _router(config: MixtralConfig) -> TopKRouter:
    moe = config.moe
    # Ours is 1 where experts are balanced and is summed over layers; transformers' is top_k, and a mean.
    balance = moe.balance_coefficient * moe.top_k / len(config.expert_layers)
    if moe.routing_algorithm == "sinkhorn":
        return SinkhornRouter(
            config.hidden_size,
            moe.num_experts,
            activation=moe.router_activation,
            iterations=moe.sinkhorn_iterations,
            tolerance=moe.sinkhorn_tol,
            capacity_factor=moe.capacity,
            balance_coefficient=balance,
        )
    return TopKRouter(
        config.hidden_size,
        moe.num_experts,
        top_k=moe.top_k,
        normalize=moe.normalize_top_k_affinities,
        capacity_factor=moe.capacity,
        balance_coefficient=balance,
    )
