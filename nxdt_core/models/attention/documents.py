"""Masks (causal, block-diagonal, banded) or lists of blocks, for attention to packed documents and within windows.

FlexAttention (Dong et al. 2024, arXiv:2412.05496) attends by blocks. A mask of seq x seq lets a kernel compute all
scores and hide most. Here the kernel gets a list of the blocks of keys that a block of queries has a document in common
with, and computes no other. Lists are small, so a model builds them once per micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from nxdt_core.models.step_boundary import step_of
from nxdt_core.protocols.step_context import StepContext

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK_ROWS = 128
"""Queries, and keys, of a block: what the kernels of FlexAttention are tuned for."""

_LEAST_HEAD_DIM = 16
"""The kernels refuse narrower heads."""

_KERNEL_OPTIONS: Any = {"FORCE_USE_FLEX_ATTENTION": True}
"""Options of the kernels. Torch's own choice for fewer than 128 queries is its decoding kernel. It puts all heads'
queries of a key into one block, which must divide 128: 64 of four heads find "No choices to select"."""


Made = TypeVar("Made")


class BlockAttention:
    """Attention of a device by blocks: a slot of attention cores, which engines fill from the device's profile."""

    def __init__(self, dtypes: frozenset[torch.dtype], *, backend: str) -> None:
        """
        Args:
            dtypes: of queries, keys and values, for which the device has kernels.
            backend: of ``torch.compile``, which makes the kernels.
        """
        self.dtypes, self.backend = dtypes, backend

    def takes(self, query: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether there are kernels for this dtype and for heads of these widths."""
        width = query.shape[-1]
        return query.dtype in self.dtypes and width == value.shape[-1] and width >= _LEAST_HEAD_DIM

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: BlockMask) -> torch.Tensor:
        """Return what :meth:`nxdt_core.models.attention.grouped_query.CausalAttention.forward` defines.

        Args:
            query: [batch, heads, seq, head_dim].
            key: [batch, kv_heads, seq, head_dim].
            value: as ``key``.
            blocks: of :func:`document_blocks`.
        """
        shared = query.shape[1] != key.shape[1]
        if query.is_meta:  # an estimate: what is kept are inputs, output and a number per row, as without documents
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
        from torch.nn.attention.flex_attention import flex_attention

        # Outside of a graph it would compute all scores unless it is compiled by itself.
        attend: Any = flex_attention if torch.compiler.is_compiling() else _compiled(self.backend)
        attended: torch.Tensor = attend(
            query, key, value, block_mask=blocks, enable_gqa=shared, kernel_options=_KERNEL_OPTIONS
        )
        return attended


@functools.cache
def _compiled(backend: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, backend=backend)
    return compiled


def document_blocks(document_ids: torch.Tensor, window: int | None = None) -> BlockMask:
    """Return the blocks of keys that each block of queries sees, without making the host wait.

    A block of keys is listed if it is not after the queries and ends after the first token that they may see. Packed
    documents are contiguous, so that each listed block has a visible key. A block is *full* if each query sees each
    key: the kernel applies no mask there.

    Args:
        document_ids: int64 [batch, seq], any numbers; padding (−1) is a separate document.
        window: number of tokens that each token sees, itself included; None for all before it.
    """
    from torch.nn.attention.flex_attention import BlockMask

    seq = document_ids.shape[1]
    # Position of the first token of each token's document, [batch, seq].
    order = document_ids.argsort(dim=1, stable=True)
    ordered = document_ids.gather(1, order)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    places = torch.arange(seq, device=document_ids.device).expand_as(document_ids)
    of_run = places.where(starts, 0).cummax(1).values  # where the run of equal ids begins
    earliest = torch.empty_like(order).scatter_(1, order, order.gather(1, of_run))
    if window is not None:
        rows = torch.arange(seq, device=document_ids.device)
        earliest = earliest.maximum(rows - (window - 1))
    ids = document_ids.to(torch.int32)
    # [batch, blocks, rows], the last row repeated to fill the last block.
    padding = -seq % BLOCK_ROWS
    of_blocks = [
        torch.cat((tensor, tensor[:, -1:].expand(-1, padding)), 1).reshape(len(tensor), -1, BLOCK_ROWS)
        for tensor in (earliest, ids)
    ]
    begins, lowest, highest = of_blocks[0].amin(-1), of_blocks[1].amin(-1), of_blocks[1].amax(-1)
    number = torch.arange(begins.shape[1], device=ids.device)
    query, key = number[:, None], number
    listed = (key <= query) & ((key + 1) * BLOCK_ROWS > begins[:, :, None])
    alone = lowest == highest  # one document
    full = (key < query) & alone[:, :, None] & alone[:, None, :] & (lowest[:, :, None] == lowest[:, None, :])
    if window is not None:
        full = full & (key * BLOCK_ROWS > (query + 1) * BLOCK_ROWS - 1 - window)

    def seen(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        visible = (key <= row) & (ids[batch, row] == ids[batch, key])
        return visible if window is None else visible & (row - key < window)

    return BlockMask.from_kv_blocks(
        *_numbered(listed & ~full),
        *_numbered(listed & full),
        BLOCK_SIZE=BLOCK_ROWS,
        mask_mod=seen,
        seq_lengths=(seq, seq),
    )


def _numbered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many blocks of keys each block of queries has, int32 [batch, 1, blocks], and their numbers. These come
    first in [batch, 1, blocks, blocks]; ``blocks`` is bool [batch, blocks, blocks]."""
    counts = blocks.sum(-1, dtype=torch.int32)
    numbers = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts.unsqueeze(1), numbers.unsqueeze(1)


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

    def __reduce__(self) -> tuple[type[DocumentMasks], tuple[()]]:
        """Return how to copy or unpickle it: without what it has cached."""
        return DocumentMasks, ()

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
        """Return :func:`~nxdt_core.models.attention.documents.document_blocks`, computed once per micro-batch."""
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
            mask: Made = ahead[name]
            return mask
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
