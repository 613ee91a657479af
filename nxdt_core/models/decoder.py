"""A decoder with rotary positions: embedding, layers with global numbers, final norm, head."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from nxdt_core.models.decoder_config import RotaryDecoderConfig
from nxdt_core.models.loss.token_losses import head_output
from nxdt_core.models.norm import RMSNorm
from nxdt_core.models.rotary import RotaryEmbedding, rotary_scaling
from nxdt_core.protocols.step_context import StepContext

__all__ = ["RotaryDecoder"]


class RotaryDecoder(nn.Module):
    """The modules that Llama, Mistral and Mixtral have around their layers.

    A pipeline stage is this module with layers taken out of ``layers`` and ``torch.nn.Identity`` in place of what is
    on other stages; its first argument is then the hidden states. One whose hidden states are cut along the sequence
    must be given ``position_ids``.

    Args:
        config: sizes of embedding, head and rotary embedding.
        layers: in order, each called as ``layer(hidden, rotary, document_ids, step=step)``, such as
            :class:`~nxdt_core.models.decoder_layer.RotaryDecoderLayer`.
    """

    def __init__(self, config: RotaryDecoderConfig, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        scaling = rotary_scaling(config.scaling)
        self.rotary = RotaryEmbedding(config.head_size, theta=config.rope_theta, scaling=scaling)
        self.layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})
        self.norm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.share_embeddings_and_output_weights:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """Return the logits [batch, seq, vocab] of ``input_ids`` int64 [batch, seq].

        Args:
            input_ids: tokens.
            position_ids: int64 [batch, seq]; None for 0, 1, 2, …
            document_ids: int64 [batch, seq]; tokens attend within their own document only. None: one document a row.
            step: of the micro-batch.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        rotary = self.rotary(position_ids)
        hidden = self.embed_tokens(input_ids)  # [batch, seq, hidden]
        for layer in self.layers.values():
            hidden = layer(hidden, rotary, document_ids, step=step)
        return head_output(self.lm_head, self.norm(hidden), step)
