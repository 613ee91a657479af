"""What a kernel must look like, and how scores are made.

All shapes are [batch, heads, rows, head_dim] for queries and [batch, kv_heads, keys, head_dim] for keys and values,
``heads`` a multiple of ``kv_heads``; log-sum-exps are [batch, heads, rows], float32 at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["AttentionKernel", "Gradients", "Scoring", "accumulation_dtype", "dense_heads"]

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of query, key and value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Scores of a block: ``scale`` x query · key, and −∞ where a row does not see a key."""

    scale: float
    causal: bool = False
    """Row ``i`` sees keys 0 … ``i``; not together with ``visible``."""
    visible: torch.Tensor | None = None
    """bool [batch or 1, 1, rows, keys]; None where all keys are seen."""

    def additive_mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """``visible`` as 0 and −∞ to be added to the scores."""
        if self.visible is None:
            return None
        zeros = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
        return zeros.masked_fill_(~self.visible, -torch.inf)


class AttentionKernel(Protocol):
    """One way to attend to a block of keys."""

    fused: bool
    """Whether it never holds the block's scores, so that an unmasked block of any size is one call."""

    def takes(self, query: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether it computes in this dtype and in heads of these widths."""
        ...

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output, in the dtype of ``query``, and log-sum-exp. Those of a row that sees no key mean nothing."""
        ...

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        scoring: Scoring,
    ) -> Gradients:
        """Return what this block adds to the gradients. ``output`` and ``lse`` are those over all keys of the rows, and
        with them a row that sees no key of this block adds nothing."""
        ...


def dense_heads(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with the elements of a head side by side: kernels assume it, and the host's does not even check."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return where parts of ``dtype`` are added up: float32 for halves, else the dtype itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
