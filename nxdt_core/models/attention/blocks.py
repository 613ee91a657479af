"""Attention to packed documents by blocks: FlexAttention (Dong et al. 2024, arXiv:2412.05496).

A mask of seq x seq lets a kernel compute all scores and hide most. Here the kernel gets a list of the blocks of keys
that a block of queries has a document in common with, and computes no other. Lists are small, so a model builds them
once per micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["BLOCK_ROWS", "BlockAttention", "document_blocks"]

BLOCK_ROWS = 128
"""Queries, and keys, of a block: what the kernels of FlexAttention are tuned for."""

_LEAST_HEAD_DIM = 16
"""The kernels refuse narrower heads."""

_KERNEL_OPTIONS: Any = {"FORCE_USE_FLEX_ATTENTION": True}
"""Without it torch takes its decoding kernel for fewer than 128 queries. That one puts the queries of all heads that
share a key into one block, which must divide 128: 64 queries of four heads find "No choices to select"."""


class BlockAttention:
    """How a device attends by blocks: a slot of attention cores, which engines fill from the device's profile."""

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
        attended: torch.Tensor = _attend(self.backend)(
            query, key, value, block_mask=blocks, enable_gqa=shared, kernel_options=_KERNEL_OPTIONS
        )
        return attended


def _attend(backend: str) -> Callable[..., Any]:
    """FlexAttention, which outside of a graph would compute all scores unless it is compiled by itself."""
    from torch.nn.attention.flex_attention import flex_attention

    attend: Callable[..., Any] = flex_attention
    return attend if torch.compiler.is_compiling() else _compiled(backend)


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
    earliest = _first_positions(document_ids)  # [batch, seq]
    if window is not None:
        rows = torch.arange(seq, device=document_ids.device)
        earliest = earliest.maximum(rows - (window - 1))
    ids = document_ids.to(torch.int32)
    of_blocks = [_by_block(tensor) for tensor in (earliest, ids)]  # [batch, blocks, rows]
    begins, lowest, highest = of_blocks[0].amin(-1), of_blocks[1].amin(-1), of_blocks[1].amax(-1)
    number = torch.arange(begins.shape[1], device=ids.device)
    query, key = number[:, None], number
    listed = (key <= query) & ((key + 1) * BLOCK_ROWS > begins[:, :, None])
    alone = lowest == highest  # one document
    full = (key < query) & alone[:, :, None] & alone[:, None, :] & (lowest[:, :, None] == lowest[:, None, :])
    if window is not None:
        full = full & (key * BLOCK_ROWS > (query + 1) * BLOCK_ROWS - 1 - window)
    return BlockMask.from_kv_blocks(
        *_numbered(listed & ~full),
        *_numbered(listed & full),
        BLOCK_SIZE=BLOCK_ROWS,
        mask_mod=_visible(ids) if window is None else _visible_in_window(ids, window),
        seq_lengths=(seq, seq),
    )


def _visible(ids: torch.Tensor) -> Callable[..., torch.Tensor]:
    def seen(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= row) & (ids[batch, row] == ids[batch, key])

    return seen


def _visible_in_window(ids: torch.Tensor, window: int) -> Callable[..., torch.Tensor]:
    def seen(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= row) & (row - key < window) & (ids[batch, row] == ids[batch, key])

    return seen


def _first_positions(ids: torch.Tensor) -> torch.Tensor:
    """Position of the first token of each token's document, int64 [batch, seq]."""
    order = ids.argsort(dim=1, stable=True)
    ordered = ids.gather(1, order)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    of_run = places.where(begins, 0).cummax(1).values  # where the run of equal ids begins
    return torch.empty_like(order).scatter_(1, order, order.gather(1, of_run))


def _by_block(tensor: torch.Tensor) -> torch.Tensor:
    """[batch, seq] to [batch, blocks, rows], the last row repeated to fill the last block."""
    missing = -tensor.shape[1] % BLOCK_ROWS
    filled = torch.cat((tensor, tensor[:, -1:].expand(-1, missing)), 1) if missing else tensor
    return filled.reshape(len(filled), -1, BLOCK_ROWS)


def _numbered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys there are for each block of queries, int32 [batch, 1, blocks], and their numbers, first
    in [batch, 1, blocks, blocks]; ``blocks`` is bool [batch, blocks, blocks]."""
    counts = blocks.sum(-1, dtype=torch.int32)
    numbers = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts.unsqueeze(1), numbers.unsqueeze(1)
