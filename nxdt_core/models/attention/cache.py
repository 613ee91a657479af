"""Keys and values of earlier tokens, and an attention core that reads them: each new token costs one forward pass.

The cache takes the place of the cores that a model's plan names (``ParallelPlan.attention_cores``), so that a model
needs no code for it. :class:`~nxdt_core.models.attention.grouped_query.AttentionSemantics` say what a core computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.models.attention.grouped_query import AttentionSemantics
from nxdt_core.protocols.step_context import StepContext

AttentionSlot = tuple[nn.Module, str, AttentionSemantics]
"""The module that holds an attention core, the core's name in it, and what the core computes."""


class KeyValueCache:
    """Keys and values of all layers, for rows that grow together: a column per token, shorter rows padded on the left.

    The first pass has the prompts, and the cores compute what they compute in training. Each later pass adds a token
    per row. A layer with a window keeps that many columns, the oldest of which is overwritten.
    """

    def __init__(self, slots: Iterable[AttentionSlot], lengths: Sequence[int], columns: int) -> None:
        """
        Args:
            slots: of this process's layers.
            lengths: tokens of each prompt.
            columns: tokens that the longest row can grow to.
        """
        self.columns, self._slots = columns, [*slots]
        self.length = 0
        """Columns so far."""
        self.new = 0
        """Columns that the pass under way adds; what a layout fills up behind them is not kept."""
        self._padding = max(lengths) - torch.tensor(lengths)
        """Tokens by which each prompt is shorter than the longest, int64 [rows]."""
        self._padded = min(lengths) < max(lengths)
        self._cores = [
            (parent._modules, name, _CachedAttention(parent.get_submodule(name), semantics, self))
            for parent, name, semantics in self._slots
        ]
        self.next_places: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        """Place of the next column, int64 [1], and its :meth:`mask`, by width."""
        self.next: torch.Tensor | None = None
        """Place of the next column, int64 [1] on the device, instead of the length of a fixed cache."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let attention read and add keys within the block."""
        for modules, name, cached in self._cores:
            modules[name] = cached
        try:
            yield
        finally:
            for modules, name, cached in self._cores:
                modules[name] = cached.core

    @contextmanager
    def extended(self, tokens: int) -> Iterator[None]:
        """Let attention read and add keys within the block, a forward pass over ``tokens`` further columns."""
        self.new = tokens
        if self.length:
            self._find_places()
        with self.in_place():
            yield
        self.length += tokens

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._padding)

    def fixed(self, columns: int) -> KeyValueCache:
        """Return a cache for as many rows, with the memory of ``columns`` columns. Its passes have equal shapes and
        addresses: what changes is in tensors."""
        cache = KeyValueCache(self._slots, [1] * self.rows, columns)
        for (_, _, core), (_, _, cached) in zip(self._cores, cache._cores, strict=True):
            cached.fill(core.keys[:, :, :0], core.values[:, :, :0])
            cache.next = torch.zeros(1, dtype=torch.int64, device=core.keys.device)
        cache._padding, cache._padded = cache._padding.to(core.keys.device), True
        return cache

    def take(self, other: KeyValueCache) -> None:
        """Let a fixed cache have the keys and values of ``other``, which has seen the prompts."""
        assert self.next is not None
        self.next.fill_(other.length)
        self._padding.copy_(other._padding)
        for (_, _, core), (_, _, cached) in zip(self._cores, other._cores, strict=True):
            for target, source in ((core.keys, cached.keys), (core.values, cached.values)):
                target[:, :, : source.shape[2]] = source
                target[:, :, source.shape[2] :] = 0  # hidden, and yet part of a sum

    def begin_pass(self, window: int) -> torch.Tensor:
        """Begin a pass of a fixed cache, and return its positions, int64 [rows, 1], below ``window``: rows that have
        ended are computed further."""
        assert self.next is not None
        self._find_places()
        positions = (self.next - self._padding[:, None]).clamp(0, window - 1)
        self.next.add_(1)
        return positions

    def _find_places(self) -> None:
        """Find the places of the next column: its number modulo the width."""
        self.next_places = {}
        for _, _, cached in self._cores:
            if cached.width not in self.next_places:
                place = (self._number % cached.width).to(cached.keys.device)
                self.next_places[cached.width] = place, self.mask(cached.width, cached.keys)

    @property
    def _number(self) -> torch.Tensor:
        """Return the number of the next column, int64 [1]."""
        return torch.tensor([self.length]) if self.next is None else self.next

    def places(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the positions and the documents, int64 [rows, tokens], of the next ``tokens`` columns. Padding is a
        separate document; None: there is no padding."""
        columns = torch.arange(self.length, self.length + tokens) - self._padding[:, None]
        documents = (columns >= 0).long() - 1 if self._padded and not self.length else None
        return columns.clamp_(min=0), documents

    def keep(self, rows: Sequence[int]) -> None:
        """Continue these rows only, in this order; one may be named several times."""
        index = torch.tensor(rows)
        self._padding = self._padding[index]
        for _, _, cached in self._cores:
            cached.keep(index)

    def mask(self, width: int, like: torch.Tensor) -> torch.Tensor | None:
        """Return what hides padding among ``width`` columns, additive [rows, 1, 1, width]; None: nothing does. A column
        that is not there yet has a negative number, and is hidden, too."""
        if not self._padded:
            return None
        columns = self._number - (self._number - torch.arange(width, device=self._padding.device)) % width
        hidden = columns < self._padding[:, None]
        mask = torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
        return mask[:, None, None].to(like.device)


def cached_width(semantics: AttentionSemantics, columns: int) -> int:
    """Return how many of ``columns`` columns a layer keeps."""
    return columns if semantics.window is None else min(semantics.window, columns)


class _CachedAttention(nn.Module):
    """Replaces a core: runs the core itself over the prompts, then attention of one token to ``width`` columns."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, core: nn.Module, semantics: AttentionSemantics, cache: KeyValueCache) -> None:
        super().__init__()
        self.core, self.semantics, self.cache = core, semantics, cache
        self.width = cached_width(semantics, cache.columns)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
        **sinks: torch.Tensor,
    ) -> torch.Tensor:
        """Return what the core does, for the new columns."""
        cache = self.cache
        if cache.length == 0 and cache.next is None:
            self.fill(key[:, :, : cache.new], value[:, :, : cache.new])
            attended: torch.Tensor = self.core(query, key, value, document_ids, step, **sinks)
            return attended
        place, hidden = cache.next_places[self.width]
        self.keys.index_copy_(2, place, key[:, :, :1])
        self.values.index_copy_(2, place, value[:, :, :1])
        seen = self.width if cache.next is not None else min(cache.length + 1, self.width)
        return _attend(
            query,
            self.keys[:, :, :seen],
            self.values[:, :, :seen],
            None if hidden is None else hidden[..., :seen],
            self.semantics,
            **sinks,
        )

    def keep(self, rows: torch.Tensor) -> None:
        """Continue ``rows`` only."""
        rows = rows.to(self.keys.device)
        self.keys, self.values = self.keys[rows], self.values[rows]

    def fill(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep the last columns of the prompts, each at its number modulo the width."""
        self.keys, self.values = (
            tensor.new_empty((*tensor.shape[:2], self.width, tensor.shape[3])) for tensor in (key, value)
        )
        columns = key.shape[2]
        for target, source in ((self.keys, key), (self.values, value)):
            if columns <= self.width:
                target[:, :, :columns] = source
            else:
                target.copy_(source[:, :, -self.width :].roll(columns % self.width, dims=2))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    semantics: AttentionSemantics,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of ``query`` [rows, heads, tokens, head_dim] to all keys [rows, kv_heads, columns, head_dim].

    Heads that share keys are queries of one head here, so that each key is read once.
    """
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    if semantics.softcap is None and sinks is None:
        scale: Any = semantics.scale
        attended = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    else:
        scale = query.shape[-1] ** -0.5 if semantics.scale is None else semantics.scale
        scores = grouped @ key.transpose(-1, -2) * (scale / (semantics.softcap or 1.0))
        if semantics.softcap is not None:
            scores = torch.tanh(scores) * semantics.softcap
        scores = scores if mask is None else scores + mask
        if sinks is not None:
            of_rows = sinks.to(scores.dtype).view(1, key.shape[1], -1, 1).expand(len(query), -1, -1, query.shape[2])
            scores = torch.cat((scores, of_rows.reshape(*scores.shape[:3], 1)), -1)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        attended = weights[..., : key.shape[2]].to(query.dtype) @ value
    return attended.reshape(*query.shape[:3], value.shape[-1])
