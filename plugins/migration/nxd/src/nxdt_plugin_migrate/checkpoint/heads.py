"""Converts the order in which NxD distributes attention heads over tensor-parallel ranks back to the model's order.

If there are more ranks than key and value heads, NxD stores each of these heads ``copies`` times
(``distributed_strategy.kv_replicator``). The copies occupy slots in the order of the ranks. On trn1, the sequence of
heads repeats (0 1 0 1); on trn2, copies are adjacent (0 0 1 1). Query heads are assigned to the slots of the head that
they attend to, so their order depends on the order of the slots. The files do not name the hardware, so the order is
determined by comparing the copies.

Reading the query heads of a key head slot by slot reverses what NxD's converter does on trn1. It is correct for any
assignment, because heads that share a key head may be swapped together with their columns of the output projection.
NxD 0.18's converter writes an order for trn2 that NxD's own layer does not use: keys in trn1's order and queries in
natural order. Such files cannot be recognised, and are read as the layer would run them.
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
    """Slots that hold the same head."""
    adjacent: bool
    """Whether copies are adjacent."""

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
        """Return the position of each query head of the whole model among those of all ranks."""
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
    """Return the slots whose order makes the copies of ``heads`` [slot, …] equal; None if neither order does."""
    for adjacent in (False, True):
        slots = Slots(query_heads=query_heads, kv_heads=kv_heads, copies=copies, adjacent=adjacent)
        if slots.same(heads):
            return slots
    return None
