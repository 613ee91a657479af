"""How attention heads are shared out over tensor-parallel ranks: as wholes, each query head beside its key's.

Rank r computes query heads r·n … r·n + n−1 and the key and value heads that those attend with. Where there are more
ranks than key and value heads, neighbouring ranks hold copies of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from nxdt_core.errors import HeadsDoNotDivide
from nxdt_core.protocols.plan import AttentionHeads

__all__ = ["HeadLayout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """Heads of one attention block over ``tp`` ranks."""

    query_heads: int
    kv_heads: int
    tp: int

    @classmethod
    def of(cls, heads: AttentionHeads, tp: int) -> HeadLayout:
        """Share out ``heads``.

        Raises:
            HeadsDoNotDivide: the ranks would not all have the same number of whole heads of each kind, or a rank's
                query heads would need another rank's keys.
        """
        query, kv = heads.query_heads, heads.kv_heads
        reason = ""
        if query % kv:
            reason = f": {kv} does not divide {query}"
        elif kv % tp and tp % kv:
            reason = f": neither of {kv} and {tp} divides the other"
        elif query % tp:
            reason = f": {tp} does not divide {query}"
        elif tp > kv and not heads.key_value:
            reason = ": the model's plan does not say which modules make keys and values (AttentionHeads.key_value)"
        if reason:
            raise HeadsDoNotDivide(query_heads=query, kv_heads=kv, tp=tp, reason=reason)
        return cls(query_heads=query, kv_heads=kv, tp=tp)

    @property
    def kv_replicas(self) -> int:
        """Ranks that hold a copy of the same key and value heads."""
        return max(1, self.tp // self.kv_heads)
