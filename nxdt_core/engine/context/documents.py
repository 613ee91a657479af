"""Packed documents under context parallelism: all ranks' document ids, and which chunks have documents in common."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from nxdt_core.distributed.collectives import gather_along
from nxdt_core.engine.context.zigzag import in_order

__all__ = ["DocumentChunks", "DocumentsOfBatches", "Relation", "documents_named", "documents_over"]

Relation = Literal["apart", "mixed", "one"]
"""Of two chunks, over all rows of the batch: no document in common, one document that fills both, or neither."""


@dataclass(frozen=True, slots=True)
class DocumentChunks:
    """The documents of one micro-batch, cut into the chunks that ranks hold."""

    ids: torch.Tensor
    """int64 [batch, seq], of the whole sequence in its own order."""
    relations: tuple[tuple[Relation, ...], ...]
    """By the numbers of two chunks."""

    def of(self, first: int, stop: int) -> torch.Tensor:
        """Return the ids [batch, tokens] of the chunks ``first`` … ``stop - 1``."""
        chunk = self.ids.shape[1] // len(self.relations)
        return self.ids[:, first * chunk : stop * chunk]


class DocumentsOfBatches:
    """Gathers each micro-batch's ids once for all layers.

    They are cached under the identity of the tensor of local ids and freed with it. A whole micro-batch sends eight
    bytes per token and reads one result on the host; if ids were sent with keys and values, every layer would do so.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._known: MutableMapping[torch.Tensor, tuple[int, DocumentChunks]] = WeakTensorKeyDictionary()

    def __call__(self, document_ids: torch.Tensor) -> DocumentChunks:
        """Return the chunks of a micro-batch from this rank's ids [batch, seq / ranks]. Collective for new ids."""
        if document_ids.is_inference():  # does not track in-place changes
            return self._gathered(document_ids)
        known = self._known.get(document_ids)
        if known is not None and known[0] == document_ids._version:
            return known[1]
        chunks = self._gathered(document_ids)
        self._known[document_ids] = (document_ids._version, chunks)
        return chunks

    def _gathered(self, document_ids: torch.Tensor) -> DocumentChunks:
        shards = gather_along(document_ids.unsqueeze(0), 0, self.group)
        ids = in_order(shards.unbind(0), dim=1)
        return DocumentChunks(ids, _relations(ids, 2 * self.group.size()))


_OVER: dict[str, DocumentsOfBatches] = {}


def documents_over(group: dist.ProcessGroup) -> DocumentsOfBatches:
    """Return the documents of all micro-batches that the ranks of ``group`` share."""
    known = _OVER.get(group.group_name)
    if known is None or known.group is not group:
        known = _OVER[group.group_name] = DocumentsOfBatches(group)
    return known


def documents_named(group_name: str) -> DocumentsOfBatches:
    """Return the documents of a group that :func:`documents_over` saw before: operators are given names, not groups."""
    return _OVER[group_name]


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
