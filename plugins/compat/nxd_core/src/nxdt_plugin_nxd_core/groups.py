"""This rank's place along ``tp``, ``dp`` and ``pp``, and the process groups of a run.

Ranks are numbered as in NxD Core: neighbours are tensor parallel, then come data parallel ranks, and pipeline stages
are the farthest apart.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nxdt_core.distributed.placement import shard_over_mesh
from nxdt_core.distributed.process_group import Ranks
from nxdt_core.protocols.ranks import RankAgreement

__all__ = ["Dimension", "Groups"]

Dimension = Literal["tp", "dp", "pp"]
_PLACES: dict[Dimension, int] = {"pp": 0, "dp": 1, "tp": 2}


@final
class Groups:
    """Sizes, ranks and process groups of a layout. Collective.

    The groups are separate from those of the engine, whose meshes are not part of its protocol.

    Args:
        tp, pp: sizes; the other ranks are data parallel.
        ranks: of the run; those of the core say how long a collective may wait, for others torch's default holds.
        device: of the tensors that the groups communicate.
    """

    def __init__(self, tp: int, pp: int, ranks: RankAgreement, device: torch.device) -> None:
        self._layout = torch.arange(ranks.world_size).view(pp, -1, tp)
        self._place = (self._layout == ranks.rank).nonzero()[0].tolist()
        self._groups: dict[Dimension, dist.ProcessGroup] = {}
        if dist.is_initialized():
            timeout_s = ranks.collective_timeout_s if isinstance(ranks, Ranks) else None
            timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
            for dim in _PLACES:
                made = dist.new_subgroups_by_enumeration(self.ranks(dim), timeout=timeout)  # type: ignore[no-untyped-call]
                self._groups[dim] = made[0]
        self._shared = (
            DeviceMesh.from_group(self._groups["tp"], device.type, mesh_dim_names=("tp",)) if tp > 1 else None
        )

    def size(self, dim: Dimension) -> int:
        """Return the number of ranks along ``dim``."""
        return self._layout.shape[_PLACES[dim]]

    def rank(self, dim: Dimension) -> int:
        """Return this rank's number along ``dim``."""
        return int(self._place[_PLACES[dim]])

    def ranks(self, dim: Dimension) -> list[list[int]]:
        """Return the ranks of each group along ``dim``."""
        along: list[list[int]] = self._layout.movedim(_PLACES[dim], -1).flatten(0, 1).tolist()
        return along

    def group(self, dim: Dimension) -> dist.ProcessGroup | None:
        """Return the process group along ``dim``; None in a program of one process, which has none."""
        return self._groups.get(dim)

    def of_columns(self, logits: torch.Tensor) -> torch.Tensor:
        """Return ``logits`` [..., vocab / tp] as a part of those of all tensor parallel ranks."""
        if self._shared is None:
            return logits
        return shard_over_mesh(logits, self._shared, logits.ndim - 1)
