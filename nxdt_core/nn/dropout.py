"""Dropout (Srivastava et al. 2014) whose masks differ on ranks that hold different values and agree on those that
hold the same.

Masks of hidden states follow from positions and are the same in every layout (:mod:`nxdt_core.nn.masks`). Those of
attention probabilities and of experts' rows depend on the layout, by salts: every rank of a run has the same global
generator, so that all that is drawn from it agrees. A module with a ``salt``
draws one number there and goes on from both: what an engine puts into the salt is what masks differ by. Masks are
thereby repeated by recomputation and by a run that goes on from a checkpoint, both of which restore the generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.devices import HOST, profile_of
from nxdt_core.nn.attention import CausalAttention
from nxdt_core.nn.documents import DocumentMasks
from nxdt_core.nn.masks import MaskPart

__all__ = ["CausalAttentionWithDropout", "Dropout", "causal_attention", "salted"]

_SEEDS = 2**62


@contextmanager
def salted(salt: int | None, device: torch.device) -> Iterator[None]:
    """Within the block, random numbers of ``device`` follow from ``salt`` and one draw of the global generator.

    ``None``: they are the generator's own.
    """
    if salt is None:
        yield
        return
    drawn = int(torch.randint(_SEEDS, (), device=HOST))
    on_host = device.type == "meta" or profile_of(device).host
    with torch.random.fork_rng([] if on_host else [device], device_type=HOST.type if on_host else device.type):
        torch.manual_seed(drawn ^ salt)
        yield


class Dropout(nn.Module):
    """Zeroes elements with probability ``p`` while training and scales the others by ``1 / (1 - p)``.

    Under an engine the mask of hidden states [rows, sequence, features] is that of their positions
    (:mod:`nxdt_core.nn.masks`), the same in every layout.
    """

    def __init__(self, p: float, *, dispatched: bool = False) -> None:
        """``dispatched``: the inputs are rows of experts, whose order is that of no sequence."""
        super().__init__()
        self.p = p
        self.dispatched = dispatched
        self.part: MaskPart | None = None
        """A slot: engines say which part of the masks by position is this process's."""
        self.salt: int | None = None
        """A slot: engines fill it where several ranks run the model. Below 2⁶²."""
        self.whole = False
        """A slot: whether tensor parallel ranks hold the same values, though it lies in a tensor block."""
        self.features: tuple[int, int] | None = None
        """A slot: where this process's features begin, and how many the whole has, where an engine knows."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` of any shape to the same."""
        if not self.training or self.p == 0:
            return hidden
        kept = None if self.part is None else self.part.mask(hidden, self.p)
        if kept is not None:
            return torch.where(kept, hidden / (1 - self.p), 0)
        with salted(self.salt, hidden.device):
            return functional.dropout(hidden, self.p)

    def extra_repr(self) -> str:
        """The probability, for ``print(model)``."""
        return f"p={self.p}"


class CausalAttentionWithDropout(CausalAttention):
    """As its base, with dropout of the probabilities. It states no semantics: nothing may take its place."""

    def __init__(self, p: float, masks: DocumentMasks | None = None) -> None:
        super().__init__(masks)
        self.p = p
        self.salt: int | None = None
        """As in :class:`Dropout`."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As :meth:`CausalAttention.forward`."""
        if not self.training:
            return super().forward(query, key, value, document_ids)
        mask = None if document_ids is None else self.masks(document_ids, query.dtype)
        with salted(self.salt, query.device):
            return functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=self.p,
                is_causal=mask is None,
                enable_gqa=query.shape[1] != key.shape[1],
            )


def causal_attention(p: float, masks: DocumentMasks | None = None) -> CausalAttention:
    """The core with dropout of probability ``p``; at 0 the one that context parallelism can replace."""
    return CausalAttentionWithDropout(p, masks) if p else CausalAttention(masks)
