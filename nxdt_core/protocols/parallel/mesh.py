"""Sizes of a run's parallel dimensions; ``DistributedStrategyConfig.mesh_sizes`` derives them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["MeshSizes", "Schedule"]

Schedule = Literal["1f1b", "interleaved", "zbv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSizes:
    """Number of ranks along each dimension; tensor parallel ranks are neighbours, pipeline stages are far apart."""

    pp: int = 1
    dp_replicate: int = 1
    """Groups of data parallel ranks; each shards parameters and optimizer state within itself only."""
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Ranks that share the experts; taken from ``dp_shard`` x ``cp``, so not a factor of the world size."""
    schedule: Schedule = "1f1b"
    vpp: int = 1
    """Pipeline stages on each rank; 2 under ``zbv``."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What data parallel ranks share: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too."""

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks over which ZeRO shards: those of ``dp_shard`` and ``cp``, which hold the same parameters."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks over which ZeRO shards experts."""
        return self.fsdp // self.ep

    @property
    def stages(self) -> int:
        """Pipeline stages of the model."""
        return self.pp * self.vpp

    @property
    def world_size(self) -> int:
        """Return the number of processes: the product of all dimensions."""
        return self.pp * self.dp * self.cp * self.tp

    def as_dict(self) -> dict[str, int]:
        """Return the size by dimension name, as checkpoints record it."""
        names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        return {name: getattr(self, name) for name in names}
