"""The attention masks of packed documents and of windows: causal, block-diagonal, banded."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import torch
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["DocumentMasks", "document_mask", "window_mask"]


def document_mask(document_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask [batch, 1, seq, seq] in ``dtype``: 0 where a token (row) may see another, −inf
    elsewhere.

    Padding (−1) counts as a document of its own, so that no row is without a visible token.
    """
    seq = document_ids.shape[1]
    earlier = torch.ones(seq, seq, dtype=torch.bool, device=document_ids.device).tril_()
    return _additive((document_ids[:, None, :, None] == document_ids[:, None, None, :]) & earlier, dtype)


def window_mask(
    window: int, rows: int, dtype: torch.dtype, device: torch.device, document_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the additive masks of blocks of ``rows`` queries, each with the ``window`` keys before the block and its
    own.

    A row sees itself and the ``window - 1`` tokens before it, as far as they belong to its document. Keys before the
    sequence's first and rows behind its last are there and mean nothing.

    Returns:
        [1, 1, rows, window + rows] for all blocks together, or [batch, blocks, rows, window + rows] of
        ``document_ids``.
    """
    row, key = torch.arange(rows, device=device)[:, None], torch.arange(window + rows, device=device)
    visible = ((row < key) & (key <= row + window))[None, None]
    if document_ids is not None:
        padded = functional.pad(document_ids, (window, -document_ids.shape[1] % rows))
        keys = padded.unfold(1, window + rows, rows)  # [batch, blocks, window + rows]
        visible = visible & (keys[:, :, window:, None] == keys[:, :, None, :])
    return _additive(visible, dtype)


class DocumentMasks:
    """Builds each batch's mask once, however many layers ask for it.

    The mask is remembered with the very tensor of ids (not with its values) and lives as long as that does; of windows
    without documents, the last one is. Additive rather than boolean, since the kernel would turn a boolean one into
    this in each layer.
    """

    def __init__(self) -> None:
        self._masks: MutableMapping[torch.Tensor, tuple[int, dict[object, torch.Tensor]]] = WeakTensorKeyDictionary()
        self._window: tuple[object, torch.Tensor] | None = None

    def __call__(self, document_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The mask of ``document_ids`` [batch, seq], as :func:`document_mask` makes it."""
        return self._of_batch(document_ids, dtype, lambda: document_mask(document_ids, dtype))

    def windowed(
        self, window: int, rows: int, dtype: torch.dtype, device: torch.device, document_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Return :func:`window_mask`, computed once per micro-batch."""
        key = (window, rows, dtype, device)
        if document_ids is not None:
            return self._of_batch(document_ids, key, lambda: window_mask(*key, document_ids))
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():  # whose tensors no backward may use
            return window_mask(*key)
        if self._window is None or self._window[0] != key:
            self._window = key, window_mask(*key)
        return self._window[1]

    def _of_batch(self, document_ids: torch.Tensor, key: object, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if torch.compiler.is_compiling() or document_ids.is_inference():  # neither tells us of changes in place
            return make()
        version, masks = self._masks.get(document_ids, (None, {}))
        if version != document_ids._version:
            masks = {}
            self._masks[document_ids] = document_ids._version, masks
        if key not in masks:
            masks[key] = make()
        return masks[key]


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
