"""The module: embedding, decoder layers with global numbers, final norm, head. Plain torch, nothing parallel."""

from __future__ import annotations

import torch
from torch import nn

from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.loss import head_output
from nxdt_core.models.rotary import LinearScaling, RotaryEmbedding
from nxdt_core.protocols.step_context import StepContext
from nxdt_plugin_gpt.config import GPTConfig
from nxdt_plugin_gpt.embedding import GPTEmbedding
from nxdt_plugin_gpt.layer import GPTLayer
from nxdt_plugin_gpt.norms import norm_of

__all__ = ["GPT"]


class GPT(nn.Module):
    """Radford et al. 2019 (GPT-2), Black et al. 2022 (GPT-NeoX, arXiv:2204.06745) and Megatron's models between them.

    A pipeline stage is this module with layers taken out of ``layers`` and ``torch.nn.Identity`` in place of what is
    on other stages; its first argument is then the hidden states. One whose hidden states are cut along the sequence
    must be given ``position_ids``.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        masks = DocumentMasks()
        self.embedding = GPTEmbedding(config)
        self.rotary = _rotary(config)
        self.layers = nn.ModuleDict({str(n): GPTLayer(config, masks) for n in range(config.num_layers)})
        # The last layer of a post-LN model already ends with a norm.
        self.norm = None if config.transformer_block_type == "post_ln" else norm_of(config, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_rows, bias=False)
        if config.share_embeddings_and_output_weights:
            self.lm_head.weight = self.embedding.tokens.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """Return the logits [batch, seq, vocab] of ``input_ids`` int64 [batch, seq].

        Args:
            input_ids: tokens, or the hidden states [batch, seq, hidden] of the stage before.
            position_ids: int64 [batch, seq]; None for 0, 1, 2, …
            document_ids: int64 [batch, seq]; tokens attend within their own document only. None: one document a row.
            step: of the micro-batch.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        rotary = None if self.rotary is None else self.rotary(position_ids)
        hidden = input_ids if input_ids.is_floating_point() else self.embedding(input_ids, position_ids, step)
        for layer in self.layers.values():
            hidden = layer(hidden, rotary, document_ids, step=step)
        return head_output(self.lm_head, hidden if self.norm is None else self.norm(hidden), step)


def _rotary(config: GPTConfig) -> RotaryEmbedding | None:
    if config.position_embedding_type != "rope":
        return None
    factor = config.positition_interpolation_factor
    return RotaryEmbedding(
        config.rotated_size,
        theta=config.position_freq_base * config.position_abf_factor,
        scaling=None if factor == 1 else LinearScaling(factor=factor),
    )
