"""A decoder with rotary positions: embedding, layers with global numbers, final norm, head; and its layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.attention.grouped_query import AttentionSemantics, GroupedQueryAttention, attention_core
from nxdt_core.models.decoder_config import RotaryDecoderConfig
from nxdt_core.models.loss import head_output
from nxdt_core.models.norm import RMSNorm
from nxdt_core.models.random.dropout import EmbeddingNoise
from nxdt_core.models.rotary import RotaryEmbedding
from nxdt_core.models.step_boundary import accept_step, takes_step
from nxdt_core.protocols.step_context import StepContext


class RotaryDecoderLayer(nn.Module):
    """Attention and a feed-forward block, each normalised before and added to the residual stream.

    Args:
        config: sizes of attention, and what it computes.
        masks: shared by all layers of a model.
        feed_forward: maps [batch, seq, hidden] to the same shape, such as :class:`~nxdt_core.models.mlp.SwiGLU`; it is
            called with ``step`` where its forward has that parameter, or else one of its parts, which then finds the
            context at the border (:mod:`nxdt_core.models.step_boundary`).
        name: attribute of the feed-forward block, part of the names of its parameters.
    """

    def __init__(
        self, config: RotaryDecoderConfig, masks: DocumentMasks, feed_forward: nn.Module, *, name: str = "mlp"
    ) -> None:
        super().__init__()
        semantics = AttentionSemantics(
            causal=True, scale=config.attention_scale, window=config.window, softcap=config.attention_softcap
        )
        self.attention_norm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.attention = GroupedQueryAttention(
            config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_size,
            core=attention_core(semantics, masks),
            qkv_bias=config.attention_bias or config.qkv_bias,
            output_bias=config.attention_bias,
            norm_eps=config.layernorm_epsilon if config.qk_norm else None,
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.feed_forward_name = name
        if any(takes_step(part) for part in feed_forward.modules()):
            accept_step(feed_forward)
        self.feed_forward_takes_step = takes_step(feed_forward)
        self.add_module(name, feed_forward)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """Return the output in the shape of ``hidden`` [batch, seq, hidden]; ``RotaryEmbedding`` returns ``rotary``."""
        hidden = hidden + self.attention(self.attention_norm(hidden), rotary, document_ids, step)
        feed_forward = getattr(self, self.feed_forward_name)  # read here: an engine may have replaced the module
        arguments = {"step": step} if self.feed_forward_takes_step else {}
        transformed: torch.Tensor = feed_forward(self.mlp_norm(hidden), **arguments)
        return hidden + transformed


class RotaryDecoder(nn.Module):
    """The modules that Llama, Mistral and Mixtral have around their layers.

    A pipeline stage is this module with layers taken out of ``layers`` and ``torch.nn.Identity`` in place of what is
    on other stages; its first argument is then the hidden states. One whose hidden states are cut along the sequence
    must be given ``position_ids``.

    Args:
        config: sizes of embedding, head and rotary embedding.
        layers: in order, each called as ``layer(hidden, rotary, document_ids, step=step)``, such as
            :class:`~nxdt_core.models.decoder.RotaryDecoderLayer`.
    """

    def __init__(self, config: RotaryDecoderConfig, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_noise = EmbeddingNoise(config.neftune_noise_alpha) if config.neftune_noise_alpha else None
        self.rotary = RotaryEmbedding(
            config.head_size,
            theta=config.rope_theta,
            scaling=config.rope_scaling,
            max_positions=config.max_position_embeddings,
        )
        self.layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})
        self.norm = RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.head_name = config.head_name
        self.logits_softcap = None if config.score_head else config.logits_softcap
        rows = 1 if config.score_head else config.vocab_size
        self.add_module(self.head_name, nn.Linear(config.hidden_size, rows, bias=False))
        if config.tied:
            getattr(self, self.head_name).weight = self.embed_tokens.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """Return the logits [batch, seq, vocab], or scores [batch, seq, 1], of ``input_ids`` int64 [batch, seq].

        Args:
            input_ids: tokens.
            position_ids: int64 [batch, seq]; None for 0, 1, 2, …
            document_ids: int64 [batch, seq]; tokens attend within their own document only. None: one document a row.
            step: of the micro-batch.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        rotary = self.rotary(position_ids, document_ids)
        hidden = self.embed_tokens(input_ids)  # [batch, seq, hidden]
        if isinstance(self.embed_noise, EmbeddingNoise):  # not in later pipeline stages
            hidden = self.embed_noise(hidden, step)
        for layer in self.layers.values():
            hidden = layer(hidden, rotary, document_ids, step=step)
        return head_output(getattr(self, self.head_name), self.norm(hidden), step, softcap=self.logits_softcap)
