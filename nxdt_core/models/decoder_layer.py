"""A decoder layer with rotary positions: grouped-query attention and a feed-forward block of the model's choice."""

from __future__ import annotations

import torch
from torch import nn

from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.attention.grouped_query import CausalAttention, GroupedQueryAttention
from nxdt_core.models.decoder_config import RotaryDecoderConfig
from nxdt_core.models.norm import RMSNorm
from nxdt_core.models.step_border import takes_step
from nxdt_core.protocols.step_context import StepContext

__all__ = ["RotaryDecoderLayer"]


class RotaryDecoderLayer(nn.Module):
    """Attention and a feed-forward block, each normalised before and added to the residual stream.

    Args:
        config: sizes of attention, and the window.
        masks: shared by all layers of a model.
        feed_forward: maps [batch, seq, hidden] to the same shape, such as :class:`~nxdt_core.models.mlp.SwiGLU`; it is
            called with ``step`` where its forward has that parameter.
        name: attribute of the feed-forward block, part of the names of its parameters.
    """

    def __init__(
        self, config: RotaryDecoderConfig, masks: DocumentMasks, feed_forward: nn.Module, *, name: str = "mlp"
    ) -> None:
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
        self.feed_forward_name = name
        self.feed_forward_takes_step = takes_step(feed_forward)
        self.add_module(name, feed_forward)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """``hidden`` [batch, seq, hidden] to the same shape; ``rotary`` as ``RotaryEmbedding`` returns it."""
        hidden = hidden + self.attention(self.attention_norm(hidden), rotary, document_ids, step)
        feed_forward = getattr(self, self.feed_forward_name)  # read here: an engine may have replaced the module
        given = (step,) if self.feed_forward_takes_step else ()
        transformed: torch.Tensor = feed_forward(self.mlp_norm(hidden), *given)
        return hidden + transformed
