"""Sizes of a run's parallel dimensions, and the stages and micro-batches of pipeline schedules. No torch.

``1f1b``: one stage per rank, a forward and a backward in turn (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1).
``interleaved``: several stages per rank, assigned round-robin (the same, section 2.2.2).
``zbv``: two stages per rank in the shape of a V, backward split in two (Qi et al. 2024, arXiv:2401.10241, section 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Literal

from nxdt_core.errors.layouts import MicroBatchesDoNotFit, ZeroBubbleCannot

__all__ = [
    "MeshSizes",
    "Schedule",
    "check_micro_batches",
    "check_whole_backward",
    "micro_batches_fit",
    "rank_of_stage",
    "stages_of_rank",
]

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


def micro_batches_fit(schedule: Schedule, pp: int, micro_batches: int) -> bool:
    """Return whether ``schedule`` over ``pp`` ranks can run so many micro-batches in a step.

    The stock 1F1B takes at least one per stage; the interleaved one works in rounds of equal size, of ``pp`` or more;
    ZBV takes any number. With few micro-batches, ranks mostly wait;
    :func:`~nxdt_core.engine.pipeline.schedules.bubble_fraction` computes for how much of a step.
    """
    if pp == 1 or schedule == "zbv":
        return micro_batches >= 1
    if schedule == "interleaved":
        return micro_batches >= 1 and micro_batches % max(1, micro_batches // pp) == 0
    return micro_batches >= pp


def check_micro_batches(schedule: Schedule, *, pp: int, micro_batches: int) -> None:
    """Refuse what the schedule cannot run.

    Raises:
        MicroBatchesDoNotFit: with the nearest number above that fits.
    """
    if not micro_batches_fit(schedule, pp, micro_batches):
        wants = {"1f1b": f"at least {pp}", "interleaved": f"rounds of one size, of {pp} or more,", "zbv": "at least 1"}
        example = next(number for number in count(micro_batches) if micro_batches_fit(schedule, pp, number))
        raise MicroBatchesDoNotFit(
            schedule=schedule, pp=pp, micro_batches=micro_batches, rule=wants[schedule], example=example
        )


def check_whole_backward(schedule: Schedule, *, recompute: bool, compiled: bool, regather: bool = False) -> None:
    """Refuse what needs backward in one piece where the schedule runs it in two.

    Recomputation would stay right, but every weight's gradient requests it again: a Llama layer was recomputed up to
    ten times per micro-batch. A compiled layer's backward is one kernel graph, which frees what the second pass needs.

    Raises:
        ZeroBubbleCannot: one of them is asked for under ``zbv``.
    """
    if schedule != "zbv":
        return
    if recompute:
        raise ZeroBubbleCannot(
            feature="activation recomputation", without="model.activations_checkpoint_granularity=null"
        )
    if regather:
        raise ZeroBubbleCannot(
            feature="gathering inputs again in backward",
            without="distributed_strategy.sequence_parallel_regather=false",
        )
    if compiled:
        raise ZeroBubbleCannot(feature="a compiled model", without="model.compile=false")


def stages_of_rank(pp_rank: int, pp: int, vpp: int, schedule: Schedule) -> tuple[int, ...]:
    """Stages, ascending, of the rank ``pp_rank`` of ``pp``; under ``zbv`` it has two with any ``vpp``."""
    if schedule == "zbv":
        return pp_rank, 2 * pp - 1 - pp_rank
    return tuple(range(pp_rank, pp * vpp, pp))


def rank_of_stage(stage: int, pp: int, schedule: Schedule) -> int:
    """Return the pipeline rank that has a stage: the inverse of :func:`stages_of_rank`."""
    return 2 * pp - 1 - stage if schedule == "zbv" and stage >= pp else stage % pp
