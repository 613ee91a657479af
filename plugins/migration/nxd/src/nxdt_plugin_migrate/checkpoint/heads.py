"""Attention heads as NxD lays them over tensor-parallel ranks, and the way back to one model's order.

Where there are more ranks than key and value heads, NxD holds each of these heads ``copies`` times
(``distributed_strategy.kv_replicator``). The copies are slots, in the order of the ranks; on trn1 the heads follow each
other and begin again (0 1 0 1), on trn2 copies stand together (0 0 1 1). Query heads are dealt to the slots of the head
that they attend to, so their order depends on it. Nothing in the files names the hardware: the order is found by
comparing the copies. Taking the query heads of a head slot by slot undoes what NxD's converter does on trn1, and is
right however they were dealt: heads that share a key head may change places, with their columns of the output
projection. (NxD 0.18's converter writes for trn2 what its own layer does not compute, keys in trn1's order and
queries in natural order; such files do not show it, and are read as the layer would run them.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Slots", "order_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Places of key and value heads over all ranks."""

    query_heads: int
    kv_heads: int
    copies: int
    """Slots that hold one and the same head."""
    adjacent: bool
    """Whether copies stand together."""

    @property
    def count(self) -> int:
        """Slots in all."""
        return self.kv_heads * self.copies

    def of(self, head: int) -> list[int]:
        """Slots that hold ``head``."""
        if self.adjacent:
            return list(range(head * self.copies, (head + 1) * self.copies))
        return list(range(head, self.count, self.kv_heads))

    def queries(self) -> list[int]:
        """Return where each query head of the whole model stands among those of all ranks."""
        each = self.query_heads // self.count
        return [slot * each + at for head in range(self.kv_heads) for slot in self.of(head) for at in range(each)]

    def same(self, heads: torch.Tensor) -> bool:
        """Return whether ``heads`` [slot, …] are equal wherever they should be copies."""
        return all(
            torch.equal(heads[slot], heads[slots[0]])
            for slots in (self.of(head) for head in range(self.kv_heads))
            for slot in slots[1:]
        )


def order_of(heads: torch.Tensor, *, query_heads: int, kv_heads: int, copies: int) -> Slots | None:
    """Return the slots in whose order the copies of ``heads`` [slot, …] are equal; None where they are in neither."""
    for adjacent in (False, True):
        slots = Slots(query_heads=query_heads, kv_heads=kv_heads, copies=copies, adjacent=adjacent)
        if slots.same(heads):
            return slots
    return None
