"""What attention needs to know of packed documents and windows: masks (causal, block-diagonal, banded) or blocks."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from nxdt_core.models.attention.blocks import document_blocks
from nxdt_core.models.step_border import step_of
from nxdt_core.protocols.step_context import StepContext

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["DocumentMasks", "document_mask", "window_mask"]

Made = TypeVar("Made")


def document_mask(document_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask [batch, 1, seq, seq] in ``dtype``: 0 where a token (row) may see another, −inf
    elsewhere.

    Padding (−1) counts as a separate document, so that every row has a visible token.
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
    """Builds each batch's mask, or its lists of blocks, once for all layers.

    The mask is cached under the identity of the tensor of ids, not under its values, and is freed with that tensor. For
    windows without documents, only the last mask is cached. Masks are additive rather than boolean, because the kernel
    would convert a boolean mask in each layer.
    """

    def __init__(self) -> None:
        self._masks: MutableMapping[torch.Tensor, tuple[int, dict[object, Any]]] = WeakTensorKeyDictionary()
        self._window: tuple[object, torch.Tensor] | None = None

    def __call__(self, document_ids: torch.Tensor, dtype: torch.dtype, step: StepContext | None = None) -> torch.Tensor:
        """The mask of ``document_ids`` [batch, seq], as :func:`document_mask` makes it."""
        return self._of_batch(document_ids, self.MASK, dtype, step, lambda: document_mask(document_ids, dtype))

    def windowed(
        self,
        window: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        document_ids: torch.Tensor | None,
        step: StepContext | None = None,
    ) -> torch.Tensor:
        """Return :func:`window_mask`, computed once per micro-batch."""
        key = (window, rows, dtype, device)
        if document_ids is not None:
            name = self.windowed_name(window)
            return self._of_batch(document_ids, name, dtype, step, lambda: window_mask(*key, document_ids))
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():  # whose tensors no backward may use
            return window_mask(*key)
        if self._window is None or self._window[0] != key:
            self._window = key, window_mask(*key)
        return self._window[1]

    def blocks(
        self, document_ids: torch.Tensor, window: int | None = None, step: StepContext | None = None
    ) -> BlockMask:
        """Return :func:`~nxdt_core.models.attention.blocks.document_blocks`, computed once per micro-batch."""
        name = self.blocks_name(window)
        return self._of_batch(document_ids, name, None, step, lambda: document_blocks(document_ids, window))

    MASK = "mask"
    """Name of what a call returns."""

    @staticmethod
    def windowed_name(window: int) -> str:
        """Return the name of what :meth:`windowed` returns for documents."""
        return f"window {window}"

    @staticmethod
    def blocks_name(window: int | None) -> str:
        """Return the name of what :meth:`blocks` returns."""
        return f"blocks {window}"

    def _of_batch(
        self,
        document_ids: torch.Tensor,
        name: str,
        dtype: torch.dtype | None,
        step: StepContext | None,
        make: Callable[[], Made],
    ) -> Made:
        ahead = step_of(step).masks
        if name in ahead and (dtype is None or ahead[name].dtype == dtype):
            given: Made = ahead[name]
            return given
        if torch.compiler.is_compiling() or document_ids.is_inference():  # neither tracks in-place changes
            return make()
        version, masks = self._masks.get(document_ids, (None, {}))
        if version != document_ids._version:
            masks = {}
            self._masks[document_ids] = document_ids._version, masks
        if (name, dtype) not in masks:
            masks[name, dtype] = make()
        made: Made = masks[name, dtype]
        return made


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
