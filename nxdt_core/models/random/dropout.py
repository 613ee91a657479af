"""Dropout (Srivastava et al. 2014) whose masks differ on ranks that hold different values and agree on those that
hold the same.

Masks of hidden states and of experts' rows follow from positions and are the same in every layout
(:mod:`nxdt_core.models.random.dropout_masks`). Those of attention probabilities depend on the layout, by salts: every
rank of a run has the same global generator, so that all that is drawn from it agrees. A module with a ``salt`` draws
one number there and combines it with its salt, so that masks differ where an engine sets different salts. Recomputation
and a resumed run repeat the masks, since both restore the generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.models.attention.documents import DocumentMasks
from nxdt_core.models.attention.grouped_query import AttentionSemantics, CausalAttention
from nxdt_core.models.random.dropout_masks import MaskPart, RowPart
from nxdt_core.models.step_border import step_of
from nxdt_core.protocols.step_context import StepContext

__all__ = ["CausalAttentionWithDropout", "Dropout", "EmbeddingNoise", "Salt", "causal_attention"]

_SEEDS = 2**62


class Salt:
    """A number by which random numbers differ from other modules' and other processes'; None where there is none.

    Held as a tensor on the host: layers that differ in a plain number would each be compiled for themselves.
    """

    def __get__(self, module: Any, owner: type[nn.Module]) -> int | None:
        """Return the salt as an int."""
        return None if module._salt is None else int(module._salt)

    def __set__(self, module: Any, salt: int | None) -> None:
        """Set the salt, from 0 to 2⁶² - 1."""
        module._salt = None if salt is None else torch.tensor(salt, device=HOST)


class Dropout(nn.Module):
    """Zeroes elements with probability ``p`` while training and scales the others by ``1 / (1 - p)``.

    Under an engine the mask of hidden states [rows, sequence, features] is that of their positions
    (:mod:`nxdt_core.models.random.dropout_masks`), the same in every layout.
    """

    salt = Salt()
    """A slot: engines fill it where several ranks run the model."""

    def __init__(self, p: float, *, dispatched: bool = False) -> None:
        """``dispatched``: the inputs are rows of experts, whose order is that of no sequence."""
        super().__init__()
        self.p = p
        self.dispatched = dispatched
        self.part: MaskPart | RowPart | None = None
        """A slot: engines say which part of the masks by position is this process's."""
        self._salt: torch.Tensor | None = None
        self.whole = False
        """A slot: whether tensor parallel ranks hold the same values, though it is in a tensor block."""
        self.features: tuple[int, int] | None = None
        """A slot: where this process's features begin, and how many the whole has, where an engine knows."""

    def forward(self, hidden: torch.Tensor, step: StepContext | None = None) -> torch.Tensor:
        """Return ``hidden`` with elements dropped while training; of any shape."""
        if not self.training or self.p == 0:
            return hidden
        mask = None if self.part is None else self.part.mask(hidden, self.p, step_of(step))
        if mask is None:
            if self._salt is None or hidden.is_meta:
                return _dropped(hidden, self.p)
            mask = _seeded_mask(_salted(self._salt), list(hidden.shape), self.p, hidden.device)
        return torch.where(mask, hidden / (1 - self.p), 0)

    def extra_repr(self) -> str:
        """Return the probability, for ``print(model)``."""
        return f"p={self.p}"


class EmbeddingNoise(Dropout):
    """Adds uniform noise within ±``alpha`` / √(tokens · features) to embeddings while training (NEFTune, Jain et al.
    2023, arXiv:2310.05914). Tokens are those of a sequence, padding included; noise is by position, as masks are."""

    def __init__(self, alpha: float) -> None:
        super().__init__(0.0)
        self.alpha = alpha

    def forward(self, hidden: torch.Tensor, step: StepContext | None = None) -> torch.Tensor:
        """Return ``hidden`` [rows, tokens, features] with elements dropped while training."""
        if not self.training:
            return hidden
        part, ids = self.part, step_of(step).ids
        noise = part.noise(hidden, step_of(step)) if isinstance(part, MaskPart) else None
        shards = part.shards if isinstance(part, MaskPart) else 1
        tokens = hidden.shape[1] if ids is None else ids.shape[1] * shards
        if noise is None:
            noise = torch.empty_like(hidden, dtype=torch.float32).uniform_(-1, 1)
        return hidden + (noise * (self.alpha / math.sqrt(tokens * hidden.shape[2]))).to(hidden.dtype)

    def extra_repr(self) -> str:
        """Return the strength, for ``print(model)``."""
        return f"alpha={self.alpha}"


class CausalAttentionWithDropout(CausalAttention):
    """Causal attention with dropout of the probabilities."""

    salt = Salt()
    """A slot: engines fill it where several ranks run the model."""

    def __init__(self, p: float, masks: DocumentMasks | None = None) -> None:
        super().__init__(masks)
        self.p = p
        self._salt: torch.Tensor | None = None
        self._attended = _seeded_attention()

    def semantics(self) -> AttentionSemantics:
        """Return the base's semantics with the dropout."""
        return replace(super().semantics(), dropout=self.p)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        document_ids: torch.Tensor | None = None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """Return :meth:`CausalAttention.forward` with dropout while training."""
        if not self.training:
            return super().forward(query, key, value, document_ids, step)
        mask = None if document_ids is None else self.masks(document_ids, query.dtype, step)
        key, value = self.heads_for(query, key, value, masked=mask is not None)
        if self._salt is None or query.is_meta:
            return _dropped_attention(query, key, value, mask, self.p)
        return self._attended(_salted(self._salt), query, key, value, mask, self.p)

    def made(self, document_ids: torch.Tensor, dtype: torch.dtype) -> tuple[str, Any]:
        """Return what :meth:`forward` will ask of the masks: there is no dropout by blocks."""
        if not self.training:
            return super().made(document_ids, dtype)
        return self.masks.MASK, self.masks(document_ids, dtype)


def causal_attention(p: float, masks: DocumentMasks | None = None) -> CausalAttention:
    """Return the core with dropout of probability ``p``; at 0 the one that context parallelism can replace."""
    return CausalAttentionWithDropout(p, masks) if p else CausalAttention(masks)


def _salted(salt: torch.Tensor) -> torch.Tensor:
    """A seed from ``salt`` and one draw of the global generator, on the host."""
    return torch.randint(_SEEDS, (), device=HOST) ^ salt


@contextmanager
def _seeded(seed: torch.Tensor, device: torch.device) -> Iterator[None]:
    """Seed the random numbers of ``device`` within the block; after it the earlier sequence continues."""
    operations = profile_of(device).operations
    before = operations.rng_state(device)
    with torch.random.fork_rng([], device_type=HOST.type):
        torch.manual_seed(int(seed))
        operations.seed(int(seed))
        try:
            yield
        finally:
            if before is not None:
                operations.set_rng_state(before, device)


def _dropped(hidden: torch.Tensor, p: float) -> torch.Tensor:
    """Return ``hidden`` with dropout, by the generator of its device or, where that has none, of the host."""
    if not profile_of(hidden.device).host_random or hidden.is_meta:
        return functional.dropout(hidden, p)
    mask = torch.empty(hidden.shape, dtype=torch.bool, device=HOST).bernoulli_(1 - p).to(hidden.device)
    return torch.where(mask, hidden / (1 - p), 0)


def _dropped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, p: float
) -> torch.Tensor:
    if profile_of(query.device).host_random and not query.is_meta:
        return _composed_attention(query, key, value, mask, p)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=p,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _composed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, p: float
) -> torch.Tensor:
    """Compute attention from matrix products, so that the probabilities to drop can be drawn on the host."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    if mask is None:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, -torch.inf)
    else:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return _dropped(scores.float().softmax(-1).to(value.dtype), p) @ value


@cache
def _seeded_attention() -> Callable[..., torch.Tensor]:
    """Return :func:`_dropped_attention` under a seed. The decorator imports ``torch._dynamo``, which takes a second:
    only models that drop probabilities call this."""

    @torch.compiler.disable(reason="the kernel draws its mask itself")  # type: ignore[no-untyped-call, untyped-decorator]
    def attended(seed: torch.Tensor, query: torch.Tensor, *others: Any) -> torch.Tensor:
        with _seeded(seed, query.device):
            return _dropped_attention(query, *others)

    return attended  # type: ignore[no-any-return]


@torch.library.custom_op("nxdt::seeded_mask", mutates_args=())
def _seeded_mask(seed: torch.Tensor, shape: Sequence[int], p: float, device: torch.device) -> torch.Tensor:
    """Draw which elements dropout of ``p`` keeps, as torch's own operator draws them."""
    drawing = HOST if profile_of(device).host_random else device
    with _seeded(seed, drawing):
        return (functional.dropout(torch.ones(tuple(shape), device=drawing), p) != 0).to(device)


@_seeded_mask.register_fake
def _(seed: torch.Tensor, shape: Sequence[int], p: float, device: torch.device) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=torch.bool, device=device)
