"""Ranks that hold the very same elements of every parameter: one reads a checkpoint, and gives it to the rest."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from nxdt_core.engine.mesh import ParallelMesh

__all__ = ["Replicas", "replica_group"]


def replica_group(mesh: ParallelMesh, *, sharded: bool) -> dist.ProcessGroup | None:
    """Return the ranks that hold what this one holds; None where it is the only one.

    Args:
        mesh: of the run.
        sharded: whether FSDP2 cuts the parameters over ``fsdp``.
    """
    if sharded:
        return mesh.group("dp_replicate")
    return mesh.group("efsdp" if mesh.sizes.ep > 1 else "fsdp")


class Replicas:
    """See :class:`nxdt_core.protocols.parallel.model.Replicas`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.reads = dist.get_rank(group) == 0

    @torch.no_grad()
    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give every rank the elements of the one that reads, in place. Collective."""
        for tensor in tensors:
            dense = tensor.contiguous()
            dist.broadcast(dense, group=self._group, group_src=0)
            if dense is not tensor and not self.reads:
                tensor.copy_(dense)
