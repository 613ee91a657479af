"""The attention mask of packed documents: causal and block-diagonal."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["DocumentMasks", "document_mask"]


def document_mask(document_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [batch, 1, seq, seq] in ``dtype``: 0 where a token (row) may see another, −inf elsewhere.

    Padding (−1) counts as a document of its own, so that no row is without a visible token.
    """
    seq = document_ids.shape[1]
    earlier = torch.ones(seq, seq, dtype=torch.bool, device=document_ids.device).tril_()
    visible = (document_ids[:, None, :, None] == document_ids[:, None, None, :]) & earlier
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


class DocumentMasks:
    """Builds each batch's mask once, however many layers ask for it.

    The mask is remembered with the very tensor of ids (not with its values) and lives as long as that does. Additive
    rather than boolean, since the kernel would turn a boolean one into this in each layer.
    """

    def __init__(self) -> None:
        self._masks: MutableMapping[torch.Tensor, tuple[int, torch.Tensor]] = WeakTensorKeyDictionary()

    def __call__(self, document_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The mask of ``document_ids`` [batch, seq], as :func:`document_mask` makes it."""
        if torch.compiler.is_compiling() or document_ids.is_inference():  # neither tells us of changes in place
            return document_mask(document_ids, dtype)
        known = self._masks.get(document_ids)
        if known is not None and known[0] == document_ids._version and known[1].dtype == dtype:
            return known[1]
        mask = document_mask(document_ids, dtype)
        self._masks[document_ids] = (document_ids._version, mask)
        return mask
