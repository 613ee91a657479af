"""From tokens and positions to the residual stream."""

from __future__ import annotations

import torch
from torch import nn

from nxdt_core.models.random.dropout import Dropout
from nxdt_core.protocols.step_context import StepContext
from nxdt_plugin_gpt.config import GPTConfig

__all__ = ["GPTEmbedding"]


class GPTEmbedding(nn.Module):
    """The table of tokens and, where positions are learned, theirs."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_rows, config.hidden_size)
        learned = config.position_embedding_type == "learned_absolute"
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.dropout = Dropout(config.hidden_dropout)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepContext | None = None
    ) -> torch.Tensor:
        """[batch, seq, hidden] of ``input_ids`` int64 [batch, seq] and ``position_ids`` int64 [batch, seq] or [seq]."""
        hidden = self.tokens(input_ids)
        if self.positions is not None:
            hidden = hidden + self.positions(position_ids)
        embedded: torch.Tensor = self.dropout(hidden, step)
        return embedded
