"""Self-attention with biases, any number of key heads and positions that are rotated in part or not at all."""

from __future__ import annotations

import torch
from torch import nn

from nxdt_core.models.rotary import rotate
from nxdt_core.protocols.step_context import StepContext
from nxdt_plugin_gpt.config import GPTConfig

__all__ = ["GPTAttention"]


class GPTAttention(nn.Module):
    """Projections, rotary embedding and core.

    In ``qkv_proj``, the query, key and value rows of one head are adjacent, so that a shard contains whole heads (the
    order of Megatron and GPT-NeoX). If heads share keys, ``q_proj``, ``k_proj`` and ``v_proj`` are separate, so that
    key heads can be copied to more ranks than there are key heads.
    """

    def __init__(self, config: GPTConfig, core: nn.Module) -> None:
        super().__init__()
        hidden, head, bias = config.hidden_size, config.head_size, config.has_bias
        self.head_size = head
        if config.fused_qkv:
            self.qkv_proj = nn.Linear(hidden, 3 * config.num_attention_heads * head, bias=bias)
        else:
            self.q_proj = nn.Linear(hidden, config.num_attention_heads * head, bias=bias)
            self.k_proj = nn.Linear(hidden, config.kv_heads * head, bias=bias)
            self.v_proj = nn.Linear(hidden, config.kv_heads * head, bias=bias)
        self.fused = config.fused_qkv
        self.core = core
        self.o_proj = nn.Linear(config.num_attention_heads * head, hidden, bias=bias)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """``hidden`` [batch, seq, hidden] to the same shape; ``rotary`` as ``RotaryEmbedding`` gives it."""
        query, key, value = self._heads(hidden)
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        attended = self.core(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), document_ids, step)
        output: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(-2))
        return output

    def _heads(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Query, key and value [batch, seq, heads, head_size]; of a shard, its heads."""
        if self.fused:
            heads: torch.Tensor = self.qkv_proj(hidden).unflatten(-1, (-1, 3 * self.head_size))
            return heads.chunk(3, dim=-1)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return tuple(projection(hidden).unflatten(-1, (-1, self.head_size)) for projection in projections)
