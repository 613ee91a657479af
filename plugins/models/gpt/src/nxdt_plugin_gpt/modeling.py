"""The GPT module: embedding, decoder layers with global numbers, final norm, head; and the modules in them.

Layers have four arrangements of their norms. Attention has biases, any number of key heads, and positions that are
rotated in part or not at all. Feed-forward blocks are plain or gated. Norms are those of Megatron's models. Plain
torch, nothing parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.loss import head_output
from nxdt_core.models.norm import RMSNorm
from nxdt_core.models.random.dropout import Dropout, causal_attention
from nxdt_core.models.rotary import RotaryEmbedding, rotate
from nxdt_core.protocols.step_context import StepContext
from nxdt_plugin_gpt.config import Activation, GPTConfig

_FUNCTIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "geglu": functional.gelu,
    "reglu": functional.relu,
    "swiglu": functional.silu,
}


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
        self.rotary: RotaryEmbedding | None = None
        if config.position_embedding_type == "rope":
            self.rotary = RotaryEmbedding(
                config.rotated_size,
                theta=config.position_freq_base * config.position_abf_factor,
                scaling=config.scaling,
                max_positions=config.max_position_embeddings,
            )
        self.layers = nn.ModuleDict({str(n): GPTLayer(config, masks) for n in range(config.num_layers)})
        # The last layer of a post-LN model already ends with a norm.
        self.norm = None if config.transformer_block_type == "post_ln" else norm_of(config, config.hidden_size)
        self.head_name = config.head_name
        head = nn.Linear(config.hidden_size, 1 if config.score_head else config.vocab_rows, bias=False)
        self.add_module(self.head_name, head)
        if config.tied:
            head.weight = self.embedding.tokens.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """Return the logits [batch, seq, vocab], or scores [batch, seq, 1], of ``input_ids`` int64 [batch, seq].

        Args:
            input_ids: tokens, or the hidden states [batch, seq, hidden] of the stage before.
            position_ids: int64 [batch, seq]; None for 0, 1, 2, …
            document_ids: int64 [batch, seq]; tokens attend within their own document only. None: one document a row.
            step: of the micro-batch.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        rotary = None if self.rotary is None else self.rotary(position_ids, document_ids)
        hidden = input_ids if input_ids.is_floating_point() else self.embedding(input_ids, position_ids, step)
        for layer in self.layers.values():
            hidden = layer(hidden, rotary, document_ids, step=step)
        return head_output(getattr(self, self.head_name), hidden if self.norm is None else self.norm(hidden), step)


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
            normalised: torch.Tensor = self.mlp_norm(hidden + self.mlp_dropout(self.mlp(hidden, step), step))
            return normalised
        attended = hidden + self._attend(self.attention_norm(hidden), rotary, document_ids, step)
        inner = self.mlp(self.mlp_norm(hidden if self.block_type == "gpt_j" else attended), step)
        result: torch.Tensor = attended + self.mlp_dropout(inner, step)
        return result

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
        if self.fused:
            query, key, value = self.qkv_proj(hidden).unflatten(-1, (-1, 3 * self.head_size)).chunk(3, dim=-1)
        else:
            query, key, value = (
                projection(hidden).unflatten(-1, (-1, self.head_size))  # [batch, seq, heads, head_size]
                for projection in (self.q_proj, self.k_proj, self.v_proj)
            )
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        attended = self.core(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), document_ids, step)
        output: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(-2))
        return output


class _Activation(nn.Module):
    """A separate module, so that it can be recomputed alone."""

    def __init__(self, name: Activation) -> None:
        super().__init__()
        self.function = _FUNCTIONS[name]

    def forward(self, up: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """``function(up)``, or ``function(gate) * up``; all [..., ffn_hidden_size]."""
        return self.function(up) if gate is None else self.function(gate) * up


class FeedForward(nn.Module):
    """``down(activation(up(x)))`` or ``down(activation(gate(x)) * up(x))``; in a NormFormer the activation's output is
    normalised."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.ffn_size, config.has_bias
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        if config.gated:
            self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.gated = config.gated
        self.activation = _Activation(config.activation)
        self.dropout = Dropout(config.ffn_dropout)
        self.norm = norm_of(config, inner) if config.transformer_block_type == "normformer" else None
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, hidden: torch.Tensor, step: StepContext | None = None) -> torch.Tensor:
        """``hidden`` [batch, seq, hidden] to the same shape."""
        inputs = (self.up_proj(hidden), self.gate_proj(hidden)) if self.gated else (self.up_proj(hidden),)
        inner = self.dropout(self.activation(*inputs), step)
        if self.norm is not None:
            inner = self.norm(inner)
        down: torch.Tensor = self.down_proj(inner)
        return down


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
