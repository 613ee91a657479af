"""Sizes of a run's parallel dimensions, and the stages of pipeline ranks. No torch.

``1f1b``: one stage per rank, a forward and a backward in turn (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1).
``interleaved``: several stages per rank, assigned round-robin (the same, section 2.2.2).
``zbv``: two stages per rank in the shape of a V, backward split in two (Qi et al. 2024, arXiv:2401.10241, section 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["MeshSizes", "Schedule", "rank_of_stage", "stages_of_rank"]

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
    """State that is sharded over data parallel ranks: 0 none, 1 optimizer state, 2 also gradients, 3 also weights."""

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


def stages_of_rank(pp_rank: int, pp: int, vpp: int, schedule: Schedule) -> tuple[int, ...]:
    """Stages, ascending, of the rank ``pp_rank`` of ``pp``; under ``zbv`` it has two with any ``vpp``."""
    if schedule == "zbv":
        return pp_rank, 2 * pp - 1 - pp_rank
    return tuple(range(pp_rank, pp * vpp, pp))


def rank_of_stage(stage: int, pp: int, schedule: Schedule) -> int:
    """Return the pipeline rank that has a stage: the inverse of :func:`stages_of_rank`."""
    return 2 * pp - 1 - stage if schedule == "zbv" and stage >= pp else stage % pp
