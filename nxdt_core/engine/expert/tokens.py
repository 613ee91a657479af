"""The slot of routers under context and tensor parallelism: counts of a micro-batch from parts of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from nxdt_core.distributed.collectives import gather_along
from nxdt_core.engine.context.zigzag import chunks_of, in_order
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.models.moe.router import TokenShards, WholeMicroBatch, exclusive_sum

__all__ = ["ZigZagTokens", "token_shards"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZigZagTokens:
    """Each rank of ``group`` holds two chunks of every sequence, as :mod:`~nxdt_core.engine.context.zigzag` deals."""

    group: dist.ProcessGroup
    copies: int = 1
    """As in :class:`~nxdt_core.models.moe.router.TokenShards`."""
    segments: int = 2

    @property
    def shards(self) -> int:
        """Ranks that share each sequence."""
        return self.group.size()

    def count(self, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the counts of :meth:`TokenShards.count` by one all-gather of 16 bytes for each expert, row and
        rank."""
        ranks = self.group.size()
        by_rank = gather_along(counts, 0, self.group).chunk(ranks)
        chunks = in_order(by_rank, 1)  # [batch, 2 * ranks, experts]
        mine = list(chunks_of(self.group.rank(), ranks))
        return exclusive_sum(chunks)[:, mine], chunks.sum((0, 1))


def token_shards(mesh: ParallelMesh) -> TokenShards:
    """Return what routers need to know of ``mesh``. Tensor parallel ranks route the same tokens each for itself."""
    group = mesh.group("cp")
    if group is None:
        return WholeMicroBatch(copies=mesh.size("tp"))
    return ZigZagTokens(group=group, copies=mesh.size("tp"))
