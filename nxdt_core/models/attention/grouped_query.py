"""Grouped-query self-attention (Ainslie et al. 2023, arXiv:2305.13245) and the replaceable core inside it.

Within a window (Beltagy et al. 2020, arXiv:2004.05150), work grows with the sequence, not its square. Rows go in
blocks, each with the keys that some row of it sees. Against one call with a mask of seq x seq, which computes all
scores and hides most, forward and backward took 0.29 of the CPU time at 2,048 tokens and a window of 512; that is half
of what causal attention to all tokens takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.models.attention.documents import BlockAttention, DocumentMasks
from nxdt_core.models.norm import RMSNorm
from nxdt_core.models.rotary import rotate
from nxdt_core.protocols.step_context import StepContext

_LEAST_ROWS = 128
"""Below, calls cost more than the hidden scores that they save."""


def block_rows(window: int) -> int:
    """Return the rows of a block: a quarter of the window, so that a fifth of the scores at most are hidden ones."""
    return max(_LEAST_ROWS, window // 4)


def windowed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, masks: torch.Tensor
) -> torch.Tensor:
    """Attend, each token to itself and the ``window - 1`` before it.

    Args:
        query: [batch, heads, seq, head_dim].
        key: [batch, kv_heads, seq, head_dim]; ``heads`` is a multiple of ``kv_heads``.
        value: as ``key``.
        window: in tokens.
        masks: of :func:`nxdt_core.models.attention.documents.window_mask`.

    Returns:
        As ``query``, as wide as ``value``.
    """
    rows, seq = masks.shape[2], query.shape[2]
    shared = query.shape[1] != key.shape[1]
    blocks = []
    for number, first in enumerate(range(0, seq, rows)):
        stop, start = min(first + rows, seq), max(0, first - window)
        of_block = masks[:, number if masks.shape[1] > 1 else 0, None, : stop - first]
        blocks.append(
            functional.scaled_dot_product_attention(
                query[:, :, first:stop],
                key[:, :, start:stop],
                value[:, :, start:stop],
                attn_mask=of_block[..., start - first + window : stop - first + window],
                enable_gqa=shared,
            )
        )
    return torch.cat(blocks, dim=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSemantics:
    """All that an attention core computes, for who puts another one in its place: softmax(scale q kᵀ) v over tokens of
    the same document. A core that does more, such as a bias, has none. Sinks are an argument of its call
    (:mod:`nxdt_core.models.attention.sinks`), which what is in its place takes as well."""

    causal: bool
    """Each token sees only itself and earlier ones."""
    scale: float | None = None
    """Factor of the scores; None for 1 / sqrt(head_dim)."""
    window: int | None = None
    """Number of tokens that each token sees, itself included; None for all."""
    softcap: float | None = None
    """Scores are ``softcap · tanh(score / softcap)``; None: as they are."""
    dropout: float = 0.0
    """Dropout rate of the probabilities, while training."""


class CausalAttention(nn.Module):
    """The attention core: softmax(scale q kᵀ) v over earlier tokens of the same document, or the last few.

    A slot: context parallelism puts a module with the same call in its place, and recomputation (``CoreAttention``)
    wraps it. It has no parameters.
    """

    def __init__(
        self, masks: DocumentMasks | None = None, *, window: int | None = None, scale: float | None = None
    ) -> None:
        """
        Args:
            masks: shared by the cores of a model, so that a batch's mask is built for the first layer only.
            window: each token sees itself and the ``window - 1`` before it (``sliding_window`` of Hugging Face); None:
                all before it.
            scale: factor of query · key; None for 1 / sqrt(head_dim).
        """
        super().__init__()
        self.masks = masks if masks is not None else DocumentMasks()
        self.window, self.scale = window, scale
        self.blocks: BlockAttention | None = None
        """A slot: how to attend to packed documents by blocks; None: under a mask."""
        self.shared_heads: frozenset[torch.dtype] | None = None
        """A slot: see :attr:`nxdt_core.distributed.devices.DeviceProfile.shared_heads`."""

    def semantics(self) -> AttentionSemantics:
        """Return what ``forward`` computes; a subclass that overrides one of the two overrides the other as well."""
        return AttentionSemantics(causal=True, scale=self.scale, window=self.window)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """Return the attention of ``query`` over ``key`` and ``value``, in the shape of ``query``.

        Args:
            query: [batch, heads, seq, head_dim].
            key: [batch, kv_heads, seq, head_dim]; ``heads`` is a multiple of ``kv_heads``.
            value: as ``key``.
            document_ids: int64 [batch, seq]; tokens see only tokens of the same document. None: one document per row,
                which skips masked blocks entirely.
            step: of the micro-batch; it may have the mask.

        Returns:
            [batch, heads, seq, head_dim]
        """
        if self.scale is not None:
            query = query * (self.scale * query.shape[-1] ** 0.5)
        if document_ids is not None and self.blocks is not None and self.blocks.takes(query, value):
            return self.blocks(query, key, value, self.masks.blocks(document_ids, self.window, step))
        window = None if self.window is None or self.window >= query.shape[2] else self.window
        key, value = self.heads_for(query, key, value, masked=window is not None or document_ids is not None)
        if window is not None:
            masks = self.masks.windowed(window, block_rows(window), query.dtype, query.device, document_ids, step)
            return windowed_attention(query, key, value, window, masks)
        mask = None if document_ids is None else self.masks(document_ids, query.dtype, step)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=query.shape[1] != key.shape[1]
        )

    def heads_for(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, masked: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``key`` and ``value``, repeated for each head of ``query`` where the device's kernels want that.

        Elsewhere ``enable_gqa`` reads each key head once; repeating them first measured 1-10 % slower on the CPU.
        """
        groups = query.shape[1] // key.shape[1]
        if groups == 1 or self.shared_heads is None or (query.dtype in self.shared_heads and not masked):
            return key, value
        return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)

    def made(self, document_ids: torch.Tensor, dtype: torch.dtype) -> tuple[str, Any]:
        """Return what :meth:`forward` will ask of :attr:`masks` for ``document_ids`` and queries of ``dtype``, and its
        name there. A compiled layer gets it in ``step.masks``: a graph that computes it would do so in each layer, and
        keep it for backward."""
        masks, window = self.masks, self.window
        if self.blocks is not None and dtype in self.blocks.dtypes:
            return masks.blocks_name(window), masks.blocks(document_ids, window)
        if window is not None and window < document_ids.shape[1]:
            masked = masks.windowed(window, block_rows(window), dtype, document_ids.device, document_ids)
            return masks.windowed_name(window), masked
        return masks.MASK, masks(document_ids, dtype)


class CappedAttention(CausalAttention):
    """The core with scores ``cap · tanh(score / cap)`` (Gemma 2, arXiv:2408.00118), composed, since fused kernels have
    no room for the cap."""

    def __init__(
        self, cap: float, masks: DocumentMasks | None = None, *, window: int | None = None, scale: float | None = None
    ) -> None:
        """``cap`` of the scores; other arguments as of :class:`CausalAttention`."""
        super().__init__(masks, window=window, scale=scale)
        self.cap = cap

    def semantics(self) -> AttentionSemantics:
        """Return what :meth:`forward` computes."""
        return replace(super().semantics(), softcap=self.cap)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """Return what :meth:`CausalAttention.forward` defines, of capped scores."""
        batch, heads, seq, width = query.shape
        scale = width**-0.5 if self.scale is None else self.scale
        grouped = query.view(batch, key.shape[1], -1, seq, width)  # [batch, kv_heads, group, seq, head_dim]
        scores = torch.tanh(grouped @ key.unsqueeze(2).transpose(-1, -2) * (scale / self.cap)) * self.cap
        every = torch.ones(seq, seq, dtype=torch.bool, device=query.device)
        if document_ids is not None:
            mask = self.masks(document_ids, query.dtype, step)
        else:
            mask = torch.zeros(1, 1, seq, seq, dtype=query.dtype, device=query.device)
            mask = mask.masked_fill_(every.triu(1), float("-inf"))
        if self.window is not None and self.window < seq:
            mask = mask.masked_fill(every.tril(-self.window), float("-inf"))
        scores = scores + mask.unsqueeze(2)
        weights = functional.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        attended: torch.Tensor = weights.to(query.dtype) @ value.unsqueeze(2)
        return attended.view(batch, heads, seq, -1)

    def made(self, document_ids: torch.Tensor, dtype: torch.dtype) -> tuple[str, Any]:
        """Return what :meth:`forward` will ask of the masks."""
        return self.masks.MASK, self.masks(document_ids, dtype)


def attention_core(semantics: AttentionSemantics, masks: DocumentMasks) -> CausalAttention:
    """Return the core that computes ``semantics``: causal, without dropout. Cores of a model share ``masks``."""
    if semantics.softcap is not None:
        return CappedAttention(semantics.softcap, masks, window=semantics.window, scale=semantics.scale)
    return CausalAttention(masks, window=semantics.window, scale=semantics.scale)


class GroupedQueryAttention(nn.Module):
    """Projections, rotary embedding and core. ``kv_heads`` equal to ``heads`` is multi-head attention.

    With a norm, each head's queries and keys are normalised before they are rotated (Qwen3, arXiv:2505.09388; Dehghani
    et al. 2023, arXiv:2302.05442).

    Three matrices, as in Hugging Face checkpoints: one fused one would save 1-3 % of their time at hidden sizes above
    300, and a shard would then no longer be a block of rows.
    The number of heads is read off the projections' outputs, so that a shard with fewer heads works unchanged.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        core: nn.Module,
        qkv_bias: bool = False,
        output_bias: bool = False,
        norm_eps: float | None = None,
    ) -> None:
        """
        Args:
            hidden_size: width of the residual stream.
            heads: query heads.
            kv_heads: key and value heads.
            head_dim: width of a head.
            core: computes attention, such as that of :func:`attention_core`.
            qkv_bias: whether queries, keys and values have biases.
            output_bias: whether the output projection has one.
            norm_eps: epsilon of the norms of queries and keys; None: there are none.
        """
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden_size, heads * head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=qkv_bias)
        self.q_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps)
        self.k_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps)
        self.core = core
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=output_bias)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """Return the output in the shape of ``hidden`` [batch, seq, hidden]; ``RotaryEmbedding`` gives ``rotary``."""
        cos, sin = rotary
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_dim))  # [batch, seq, heads, head_dim]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        attended = self.core(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), document_ids, step)
        output: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(-2))
        return output
