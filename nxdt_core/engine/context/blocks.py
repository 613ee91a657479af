"""The tokens and documents of a context parallel rank, and the blocks of attention that it computes.

A rank of ``n`` holds chunks ``r`` and ``2n - 1 - r`` of ``2n``, an early and a late one. Under a causal mask the tokens
of a late chunk see many keys and those of an early one few; a rank with one of each has as much to do as any other.
(Cut into ``n`` plain pieces, the last rank would compute twice the mean.)

Rows of a block are the rank's own queries: its early chunk, then its late one. Some blocks are left out: those that
causality hides, those entirely before the window, and, with packed documents, those whose chunks share no document.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from nxdt_core.distributed.collectives import gather_along
from nxdt_core.models.attention.partial_attention import Block, Window

Relation = Literal["apart", "mixed", "one"]
"""Relation of two chunks over all rows: no document in common, parts of several, or one document that fills both."""


def zigzag_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of the two chunks of ``rank``, in the order in which it holds them."""
    return rank, 2 * ranks - 1 - rank


def zigzag_runs(rank: int, ranks: int, length: int) -> list[int]:
    """Return where the chunks of ``rank`` begin and end in a sequence of ``length``, as :attr:`MaskPart.runs` gives
    them."""
    chunk = length // (2 * ranks)
    return [at for number in zigzag_chunks(rank, ranks) for at in (number * chunk, (number + 1) * chunk)]


def zigzag_shard(tensor: torch.Tensor, rank: int, ranks: int, dim: int) -> torch.Tensor:
    """Return the part of ``tensor`` that ``rank`` holds; ``dim`` must divide by twice the ranks."""
    chunks = tensor.tensor_split(2 * ranks, dim)
    return torch.cat([chunks[chunk] for chunk in zigzag_chunks(rank, ranks)], dim)


def zigzag_unshard(shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Return the whole sequence from the parts of all ranks: the inverse of :func:`zigzag_shard`."""
    early, late = zip(*(shard.tensor_split(2, dim) for shard in shards), strict=True)
    return torch.cat((*early, *reversed(late)), dim)


@dataclass(frozen=True, slots=True)
class DocumentChunks:
    """The documents of one micro-batch, by the chunks of its sequences."""

    ids: torch.Tensor
    """Document ids of the whole sequence in its own order, int64 [batch, seq]."""
    relations: tuple[tuple[Relation, ...], ...]
    """Relation of each pair of chunks, by their numbers."""

    def of(self, first: int, stop: int) -> torch.Tensor:
        """Return the ids [batch, tokens] of the chunks ``first`` … ``stop - 1``."""
        chunk = self.ids.shape[1] // len(self.relations)
        return self.ids[:, first * chunk : stop * chunk]


class DocumentCache:
    """Gathers each micro-batch's ids once for all layers.

    They are cached under the identity of the tensor of local ids and freed with it. A whole micro-batch sends eight
    bytes per token and reads one result on the host; if ids were sent with keys and values, every layer would do so.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._chunks: MutableMapping[torch.Tensor, tuple[int, DocumentChunks]] = WeakTensorKeyDictionary()

    def __call__(self, document_ids: torch.Tensor) -> DocumentChunks:
        """Return the chunks of a micro-batch from this rank's ids [batch, seq / ranks]. Collective for new ids."""
        tracked = not document_ids.is_inference()  # which does not track in-place changes
        cached = self._chunks.get(document_ids) if tracked else None
        if cached is not None and cached[0] == document_ids._version:
            return cached[1]
        shards = gather_along(document_ids.unsqueeze(0), 0, self.group)
        ids = zigzag_unshard(shards.unbind(0), dim=1)
        chunks = DocumentChunks(ids, _relations(ids, 2 * self.group.size()))
        if tracked:
            self._chunks[document_ids] = (document_ids._version, chunks)
        return chunks


_OVER: dict[str, DocumentCache] = {}


def document_cache(group_name: str) -> DocumentCache:
    """Return the documents of all micro-batches that the ranks of a group share: operators are given names."""
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined, arg-type]
    cache = _OVER.get(group_name)
    if cache is None or cache.group is not group:
        cache = _OVER[group_name] = DocumentCache(group)
    return cache


def _relations(ids: torch.Tensor, chunks: int) -> tuple[tuple[Relation, ...], ...]:
    if ids.is_meta:  # an estimate, which knows no ids and must assume the most
        assumed: Relation = "mixed"
        return ((assumed,) * chunks,) * chunks
    _, dense = torch.unique(ids, return_inverse=True)  # numbers from 0, independent of the ids' values
    by_chunk = torch.stack(dense.tensor_split(chunks, 1))  # [chunks, batch, tokens]
    present = torch.zeros(*by_chunk.shape[:2], int(dense.max()) + 1, device=ids.device)
    present.scatter_(2, by_chunk, 1.0)
    common = torch.einsum("rbd,kbd->rkb", present, present)
    apart = (common == 0).all(-1)
    single = (present.sum(-1) == 1).all(-1)
    one = (common == 1).all(-1) & single & single[:, None]
    named: tuple[Relation, ...] = ("mixed", "apart", "one")
    return tuple(tuple(named[code] for code in row) for row in (apart + 2 * one.int()).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSequence:
    """Settings of attention over a sequence that is sharded over ranks."""

    scale: float
    """Factor of the scores."""
    softcap: float | None
    """Scores are ``softcap · tanh(score / softcap)``; None: as they are."""
    group: dist.ProcessGroup
    """The context parallel ranks."""
    method: str
    """How keys and values travel: ``ring`` or ``gather``."""
    documents: DocumentChunks | None
    """Documents of the chunks; None where each row of the batch is one document."""
    window: int | None
    """Number of tokens that each token sees, itself included; None for all before it."""
    sinks: torch.Tensor | None
    """[heads], scores without a value; None: there are none."""


def ring_blocks(
    rank: int, source: int, ranks: int, chunk: int, documents: DocumentChunks | None, window: int | None = None
) -> list[Block]:
    """Return the blocks of ``rank``'s queries with the keys of ``source``, both in the order in which ranks hold them.

    Args:
        rank: context parallel rank that has the queries.
        source: context parallel rank that has the keys.
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
        _block(rows, row, keys, key, key + 1, chunk, documents, window)
        for rows, row in _halves(rank, ranks, chunk)
        for keys, key in _halves(source, ranks, chunk)
        if key <= row and _related(documents, window, chunk, row, key)
    ]
    return sorted(blocks, key=lambda block: not block.diagonal)


def local_blocks(
    rank: int, ranks: int, chunk: int, documents: DocumentChunks | None, window: int | None = None
) -> list[Block]:
    """Return both chunks of ``rank`` with themselves: what needs no other rank's keys."""
    return [
        _block(half, number, half, number, number + 1, chunk, documents, window)
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
            blocks.append(_block(rows, number, keys, first, number, chunk, documents, window))
    return blocks


def _halves(rank: int, ranks: int, chunk: int) -> list[tuple[slice, int]]:
    """Return the slice of each of the rank's chunks among its tokens, and the chunk's number."""
    return list(zip((slice(0, chunk), slice(chunk, 2 * chunk)), zigzag_chunks(rank, ranks), strict=True))


def _related(documents: DocumentChunks | None, window: int | None, chunk: int, row: int, key: int) -> bool:
    """Return whether chunk ``row`` sees a token of chunk ``key``, which is the same chunk or an earlier one."""
    nearest = max(0, (row - key - 1) * chunk + 1)
    return (documents is None or documents.relations[row][key] != "apart") and (window is None or nearest < window)


def _block(
    rows: slice,
    row: int,
    keys: slice,
    first: int,
    stop: int,
    chunk: int,
    documents: DocumentChunks | None,
    window: int | None,
) -> Block:
    """Return the block of chunk ``row`` with the chunks ``first`` … ``stop - 1``, without masks that hide nothing."""
    masked, distance = None, (row - first) * chunk
    if documents is not None and any(documents.relations[row][key] != "one" for key in range(first, stop)):
        masked = documents.of(row, row + 1), documents.of(first, stop)
    windowed = None
    if window is not None and distance + chunk > window:
        windowed = Window(length=window, distance=distance)
    return Block(rows=rows, keys=keys, diagonal=row == first, documents=masked, window=windowed)
