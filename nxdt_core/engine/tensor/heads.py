"""How attention heads are shared out over tensor-parallel ranks: as wholes, each query head with its key's.

Rank r computes query heads r·n … r·n + n−1 and the key and value heads that those attend with. Where there are more
ranks than key and value heads, neighbouring ranks hold copies of one. Where the numbers do not divide, heads of zeros
may fill up (:mod:`~nxdt_core.engine.tensor.padding`): whole groups of them behind the last, or some behind each
group's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from nxdt_core.engine.tensor.padding import PaddedDim
from nxdt_core.errors.launch import HeadsDoNotDivide
from nxdt_core.protocols.plan import AttentionHeads

__all__ = ["HeadLayout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """Heads of one attention block over ``tp`` ranks; ``padded_*`` count the heads of zeros too."""

    query_heads: int
    kv_heads: int
    tp: int
    padded_kv_heads: int
    padded_group: int
    """Query heads of each key head."""

    @classmethod
    def of(cls, heads: AttentionHeads, tp: int, *, pad: bool = False) -> HeadLayout:
        """Share out ``heads``; without ``pad`` nothing is filled up.

        Raises:
            HeadsDoNotDivide: the ranks would not all have the same number of whole heads of each kind, or a rank's
                query heads would need another rank's keys.
        """
        query, kv = heads.query_heads, heads.kv_heads
        group = query // kv
        padded_kv = _multiple(kv, tp) if tp < kv else next(n for n in range(kv, tp + 1) if tp % n == 0)
        padded_group = _multiple(group, tp // padded_kv) if tp > padded_kv else group
        layout = cls(query_heads=query, kv_heads=kv, tp=tp, padded_kv_heads=padded_kv, padded_group=padded_group)
        reason = layout._obstacle(heads, pad=pad)
        if reason is not None:
            raise HeadsDoNotDivide(query_heads=query, kv_heads=kv, tp=tp, reason=reason)
        return layout

    @property
    def kv_replicas(self) -> int:
        """Ranks that hold a copy of the same key and value heads."""
        return max(1, self.tp // self.padded_kv_heads)

    @property
    def padded(self) -> bool:
        """Whether heads of zeros are among them."""
        return self.padded_kv_heads * self.padded_group != self.query_heads

    def query(self, dim: int, head_dim: int) -> PaddedDim:
        """Return how the dimension ``dim`` of query heads is divided over the ranks."""
        group = self.query_heads // self.kv_heads
        block = self.padded_kv_heads * self.padded_group // self.tp
        # A rank holds whole groups, or several ranks share a group: in both cases, real heads come first on each rank.
        starts, counts = [], []
        for rank in range(self.tp):
            first_group, within = divmod(rank * block, self.padded_group)
            groups = max(0, min(block // self.padded_group, self.kv_heads - first_group))
            alone = min(block, max(0, group - within)) if first_group < self.kv_heads else 0
            counts.append(groups * group if block >= self.padded_group else alone)
            starts.append(min(first_group, self.kv_heads) * group + min(within, group))
        return PaddedDim.of(dim, block=block, starts=starts, counts=counts, unit=head_dim)

    def key_value(self, dim: int, head_dim: int) -> PaddedDim:
        """Return the same for key and value heads, over the groups of ranks that hold different ones."""
        parts = min(self.tp, self.padded_kv_heads)
        block = self.padded_kv_heads // parts
        starts = [min(part * block, self.kv_heads) for part in range(parts)]
        counts = [min(block, self.kv_heads - start) for start in starts]
        return PaddedDim.of(dim, block=block, starts=starts, counts=counts, unit=head_dim)

    def _obstacle(self, heads: AttentionHeads, *, pad: bool) -> str | None:
        """Why not, as the end of a sentence."""
        query, kv, tp = self.query_heads, self.kv_heads, self.tp
        if query % kv:
            return f": {kv} does not divide {query}"
        if self.padded and not pad:
            if kv % tp and tp % kv:
                return f": neither of {kv} and {tp} divides the other"
            return f": {tp} does not divide {query}"
        known = heads.query and heads.key_value and heads.output
        if (self.padded or self.kv_replicas > 1) and not known:
            return (
                ": the model's plan does not say which modules make them (query, key_value, output of AttentionHeads)"
            )
        return None


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of
