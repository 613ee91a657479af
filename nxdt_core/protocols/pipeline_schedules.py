"""Rules of pipeline schedules: where stages lie, and how many micro-batches a step must have. No torch.

``1f1b``: one stage a rank, a forward and a backward in turn (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1).
``interleaved``: several stages a rank, dealt out like cards (the same, section 2.2.2).
``zbv``: two stages a rank in the shape of a V, backward split in two (Qi et al. 2024, arXiv:2401.10241, section 6).
"""

from __future__ import annotations

from dataclasses import dataclass

from nxdt_core.errors import MicroBatchesDoNotFit, ZeroBubbleCannot
from nxdt_core.protocols.mesh import Schedule

__all__ = [
    "MicroBatchRule",
    "check_micro_batches",
    "check_whole_backward",
    "micro_batches_needed",
    "rank_of_stage",
    "stages_of_rank",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRule:
    """Numbers of micro-batches that fill a schedule."""

    least: int
    multiple_of: int = 1

    def allows(self, micro_batches: int) -> bool:
        """Whether a step may have so many."""
        return micro_batches >= self.least and micro_batches % self.multiple_of == 0

    def nearest(self, micro_batches: int) -> int:
        """The smallest allowed number that is not below ``micro_batches``."""
        return max(self.least, -(-micro_batches // self.multiple_of) * self.multiple_of)

    def __str__(self) -> str:
        return f"a multiple of {self.multiple_of}" if self.multiple_of > 1 else f"at least {self.least}"


def micro_batches_needed(schedule: Schedule, pp: int) -> MicroBatchRule:
    """What ``schedule`` over ``pp`` ranks asks of the number of micro-batches that a rank has in a step."""
    if schedule == "interleaved":
        return MicroBatchRule(least=pp, multiple_of=pp)
    return MicroBatchRule(least=2 * pp if schedule == "zbv" else pp)


def check_micro_batches(schedule: Schedule, *, pp: int, micro_batches: int) -> None:
    """Refuse what the schedule cannot run.

    Raises:
        MicroBatchesDoNotFit: with the number that is nearest.
    """
    rule = micro_batches_needed(schedule, pp)
    if pp > 1 and not rule.allows(micro_batches):
        raise MicroBatchesDoNotFit(
            schedule=schedule, pp=pp, micro_batches=micro_batches, rule=str(rule), example=rule.nearest(micro_batches)
        )


def check_whole_backward(schedule: Schedule, *, recompute: bool, compiled: bool) -> None:
    """Refuse what needs backward in one piece where the schedule runs it in two.

    Recomputation would stay right, but every weight's gradient asks for it anew: a Llama layer was recomputed up to
    ten times a micro-batch. A compiled layer's backward is one kernel graph, which frees what the second pass needs.

    Raises:
        ZeroBubbleCannot: one of them is asked for under ``zbv``.
    """
    if schedule != "zbv":
        return
    if recompute:
        raise ZeroBubbleCannot(
            feature="activation recomputation", without="model.activations_checkpoint_granularity=null"
        )
    if compiled:
        raise ZeroBubbleCannot(feature="a compiled model", without="model.compile=false")


def stages_of_rank(pp_rank: int, pp: int, vpp: int, schedule: Schedule) -> tuple[int, ...]:
    """Stages, ascending, of the rank ``pp_rank`` of ``pp``; under ``zbv`` it has two whatever ``vpp`` says."""
    if schedule == "zbv":
        return pp_rank, 2 * pp - 1 - pp_rank
    return tuple(range(pp_rank, pp * vpp, pp))


def rank_of_stage(stage: int, pp: int, schedule: Schedule) -> int:
    """The inverse of :func:`stages_of_rank`."""
    return 2 * pp - 1 - stage if schedule == "zbv" and stage >= pp else stage % pp
