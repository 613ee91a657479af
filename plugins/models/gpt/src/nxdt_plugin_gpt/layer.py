"""A decoder layer in the four arrangements of its norms."""

from __future__ import annotations

import torch
from torch import nn

from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.random.dropout import Dropout, causal_attention
from nxdt_core.protocols.step_context import StepContext
from nxdt_plugin_gpt.attention import GPTAttention
from nxdt_plugin_gpt.config import GPTConfig
from nxdt_plugin_gpt.mlp import FeedForward
from nxdt_plugin_gpt.norms import norm_of

__all__ = ["GPTLayer"]


class GPTLayer(nn.Module):
    """Attention and feed-forward block around the residual stream.

    ``pre_ln`` normalises what goes into each block, ``post_ln`` the stream behind each, ``gpt_j`` is ``pre_ln`` with
    both blocks fed by the same stream (Wang & Komatsuzaki 2021), ``normformer`` is ``pre_ln`` with two norms more
    (Shleifer et al. 2021, arXiv:2110.09456).
    """

    def __init__(self, config: GPTConfig, masks: DocumentMasks) -> None:
        super().__init__()
        size, self.block_type = config.hidden_size, config.transformer_block_type
        self.attention_norm = norm_of(config, size)
        self.attention = GPTAttention(config, causal_attention(config.attention_dropout, masks))
        self.attention_output_norm = norm_of(config, size) if self.block_type == "normformer" else None
        self.attention_dropout = Dropout(config.hidden_dropout)
        self.mlp_norm = norm_of(config, size)
        self.mlp = FeedForward(config)
        self.mlp_dropout = Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """``hidden`` [batch, seq, hidden] to the same shape."""
        if self.block_type == "post_ln":
            hidden = self.attention_norm(hidden + self._attend(hidden, rotary, document_ids, step))
            normalised: torch.Tensor = self.mlp_norm(hidden + self._transform(hidden, step))
            return normalised
        attended = hidden + self._attend(self.attention_norm(hidden), rotary, document_ids, step)
        return attended + self._transform(self.mlp_norm(hidden if self.block_type == "gpt_j" else attended), step)

    def _attend(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        document_ids: torch.Tensor | None,
        step: StepContext | None,
    ) -> torch.Tensor:
        attended = self.attention(hidden, rotary, document_ids, step)
        if self.attention_output_norm is not None:
            attended = self.attention_output_norm(attended)
        added: torch.Tensor = self.attention_dropout(attended, step)
        return added

    def _transform(self, hidden: torch.Tensor, step: StepContext | None) -> torch.Tensor:
        added: torch.Tensor = self.mlp_dropout(self.mlp(hidden, step), step)
        return added
