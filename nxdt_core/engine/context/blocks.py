"""Which blocks of the attention matrix a context parallel rank computes, and in which order.

Rows are the rank's own queries: its early chunk, then its late one. Some blocks are left out: those that causality
hides, those entirely before the window, and, with packed documents, those whose chunks share no document.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from nxdt_core.engine.context.attention.block import Block, Window
from nxdt_core.engine.context.documents import DocumentChunks
from nxdt_core.engine.context.zigzag import chunks_of

__all__ = ["Sharing", "local_blocks", "prefix_blocks", "ring_blocks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What is computed over the ranks that share a sequence."""

    scale: float
    """Of the scores."""
    group: dist.ProcessGroup
    """The context parallel ranks."""
    documents: DocumentChunks | None
    """None where each row of the batch is one document."""
    window: int | None
    """How many tokens one sees, itself included; None for all before it."""


def ring_blocks(
    rank: int, source: int, ranks: int, chunk: int, documents: DocumentChunks | None, window: int | None = None
) -> list[Block]:
    """Return the blocks of ``rank``'s queries with the keys of ``source``, both in the order in which ranks hold them.

    Args:
        rank: of the queries.
        source: of the keys.
        ranks: size of the group.
        chunk: tokens per chunk.
        documents: None where each row of the batch is one document.
        window: number of tokens that each token sees, itself included; None for all before it.
    """
    early, late, both = slice(0, chunk), slice(chunk, 2 * chunk), slice(0, 2 * chunk)
    if documents is None and window is None:
        if source == rank:
            return [Block(rows=both, keys=both, diagonal=True)]
        # The early chunk of a lower rank precedes both of ours, and its late one follows them; both chunks of a higher
        # rank are between ours. Either way half of the scores are computed, and no mask is needed.
        return [Block(rows=both, keys=early) if source < rank else Block(rows=late, keys=both)]
    blocks = [
        Block(
            rows=rows,
            keys=keys,
            diagonal=row == key,
            documents=_masked(documents, row, key, key + 1),
            window=_windowed(window, chunk, row, key),
        )
        for rows, row in zip((early, late), chunks_of(rank, ranks), strict=True)
        for keys, key in zip((early, late), chunks_of(source, ranks), strict=True)
        if key <= row and _related(documents, window, chunk, row, key)
    ]
    return sorted(blocks, key=lambda block: not block.diagonal)


def local_blocks(
    rank: int, ranks: int, chunk: int, documents: DocumentChunks | None, window: int | None = None
) -> list[Block]:
    """Return both chunks of ``rank`` with themselves: what needs no other rank's keys."""
    return [
        Block(
            rows=half,
            keys=half,
            diagonal=True,
            documents=_masked(documents, number, number, number + 1),
            window=_windowed(window, chunk, number, number),
        )
        for half, number in _halves(rank, ranks, chunk)
    ]


def prefix_blocks(
    rank: int, ranks: int, chunk: int, documents: DocumentChunks | None, window: int | None = None
) -> list[Block]:
    """Return both chunks of ``rank`` with all keys before them; ``keys`` index the whole sequence in its own order.

    Documents and the window shorten the prefix: it begins with the first chunk of which a token is visible.
    """
    blocks = []
    for rows, number in _halves(rank, ranks, chunk):
        first = next((key for key in range(number) if _related(documents, window, chunk, number, key)), None)
        if first is not None:
            keys = slice(first * chunk, number * chunk)
            masked, windowed = _masked(documents, number, first, number), _windowed(window, chunk, number, first)
            blocks.append(Block(rows=rows, keys=keys, documents=masked, window=windowed))
    return blocks


def _halves(rank: int, ranks: int, chunk: int) -> list[tuple[slice, int]]:
    """Return the slice of each of the rank's chunks among its tokens, and the chunk's number."""
    return list(zip((slice(0, chunk), slice(chunk, 2 * chunk)), chunks_of(rank, ranks), strict=True))


def _related(documents: DocumentChunks | None, window: int | None, chunk: int, row: int, key: int) -> bool:
    """Return whether chunk ``row`` sees a token of chunk ``key``, which is the same chunk or an earlier one."""
    nearest = max(0, (row - key - 1) * chunk + 1)
    return (documents is None or documents.relations[row][key] != "apart") and (window is None or nearest < window)


def _windowed(window: int | None, chunk: int, row: int, first: int) -> Window | None:
    """Return the window of chunk ``row`` over the keys from chunk ``first`` on; None where it holds all of them."""
    distance = (row - first) * chunk
    return None if window is None or distance + chunk <= window else Window(length=window, distance=distance)


def _masked(
    documents: DocumentChunks | None, row: int, first: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Ids of chunk ``row`` and of the chunks ``first`` … ``stop - 1``, unless all are one document."""
    if documents is None or all(documents.relations[row][key] == "one" for key in range(first, stop)):
        return None
    return documents.of(row, row + 1), documents.of(first, stop)
