"""What a run of any size would need, from one process without its devices: memory, traffic, idle time, sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from nxdt_core.parallel.data import check_sums, needs_sharding
from nxdt_core.parallel.estimate.memory import Memory, Storage, fullest_moment
from nxdt_core.parallel.estimate.rank import MeasuredRank, measure_rank
from nxdt_core.parallel.estimate.traffic import sent_in_a_step
from nxdt_core.parallel.estimate.weights import count_unique
from nxdt_core.parallel.estimate.workload import Workload
from nxdt_core.parallel.mesh import ParallelMesh
from nxdt_core.parallel.pipeline.schedules import Operation, bubble_fraction, schedule_operations
from nxdt_core.parallel.pipeline.stages import stage_layers, stages_of_rank
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["Estimate", "RankEstimate", "estimate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEstimate:
    """The ranks of one place in the pipeline; they differ in nothing that is counted."""

    pp_rank: int
    stages: tuple[int, ...]
    layers: int
    parameters: int
    """Elements that the rank computes with."""
    stored: int
    """Elements of them that it stores."""
    memory: Memory
    sent: Mapping[str, int]
    """Bytes that it sends in a step, by mesh dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Of one run."""

    parameters: int
    """Of the whole model, tied ones once."""
    trained: int
    micro_batches: int
    """Of one step, on each rank."""
    tokens_per_step: int
    bubble: float
    """Share of a step in which pipeline ranks wait for one another."""
    checkpoint_bytes: int
    """Weights and optimizer state."""
    flops_per_token: float
    """Forward and backward, recomputation not counted."""
    ranks: tuple[RankEstimate, ...]
    """By place in the pipeline."""

    @property
    def fullest(self) -> RankEstimate:
        """Where memory ends first."""
        return max(self.ranks, key=lambda rank: rank.memory.total)

    @property
    def flops_per_step(self) -> float:
        """Of all ranks together."""
        return self.flops_per_token * self.tokens_per_step


def estimate(work: Workload) -> Estimate:
    """Build every kind of pipeline rank on the meta device in a fake process group, and measure a micro-batch on it.

    Raises:
        NxdtError: the model's plan does not allow the layout.
        ModelReadsValues: the model cannot run without values.
    """
    sizes = work.sizes
    check_sums(sizes, work.precision, micro_batches=work.micro_batches)
    with torch.device("meta"):
        whole, plan = work.builder.build(), work.builder.plan()
        for adapter in work.adapters:
            plan = adapter.apply(whole, plan)
    storage = Storage(
        policy=work.precision,
        zero_stage=sizes.zero_stage,
        sharded=needs_sharding(ParallelMesh(sizes, None), work.precision),
        replicated=sizes.fsdp * sizes.dp_replicate > 1,
        accumulates=work.micro_batches > 1,
        state_bytes=work.state_bytes,
        stand_ins=work.stand_ins,
    )
    orders = schedule_operations(sizes.schedule, sizes.pp, sizes.vpp, work.micro_batches)
    measured: dict[object, MeasuredRank] = {}
    ranks = []
    for pp_rank, kind in enumerate(_kinds(whole, plan, work)):
        if kind not in measured:
            measured[kind] = measure_rank(work, storage, pp_rank)
        ranks.append(_of_rank(measured[kind], work, storage, pp_rank, orders[pp_rank]))
    parameters, trained = count_unique(whole)
    return Estimate(
        parameters=parameters,
        trained=trained,
        micro_batches=work.micro_batches,
        tokens_per_step=work.global_batch_size * work.seq_length * work.rows // work.micro_batch_size,
        bubble=bubble_fraction(sizes.schedule, sizes.pp, sizes.vpp, work.micro_batches),
        checkpoint_bytes=_checkpoint_bytes(work, storage, frozen=parameters - trained, trained=trained),
        flops_per_token=work.builder.flops_per_token(work.seq_length),
        ranks=tuple(ranks),
    )


def _checkpoint_bytes(work: Workload, storage: Storage, *, frozen: int, trained: int) -> int:
    saved = round(trained * (storage.saved_bytes(bfloat16=work.saves_bfloat16) + work.state_bytes))
    if not all(adapter.saves_base for adapter in work.adapters):
        return saved
    return saved + frozen * storage.saved_bytes(bfloat16=work.saves_bfloat16, frozen=True)


def _kinds(whole: nn.Module, plan: ParallelPlan, work: Workload) -> list[object]:
    """By place in the pipeline, what tells ranks apart that differ in their stages; only one of a kind is measured."""
    sizes = work.sizes
    if sizes.stages == 1 or plan.pipeline is None:
        return [None] * sizes.pp
    layers = {
        f"{plan.pipeline.layers}.{name}": part
        for name, part in whole.get_submodule(plan.pipeline.layers).named_children()
    }
    shares = stage_layers(list(layers), sizes.stages, work.options.pipeline_cuts)
    shapes = [tuple(_shapes(layers[name]) for name in share) for share in shares]
    return [
        tuple((number == 0, number == sizes.stages - 1, shapes[number]) for number in stages)
        for stages in (stages_of_rank(rank, sizes.pp, sizes.vpp, sizes.schedule) for rank in range(sizes.pp))
    ]


def _shapes(layer: nn.Module) -> tuple[object, ...]:
    return tuple((name, parameter.shape) for name, parameter in layer.named_parameters())


def _of_rank(
    measured: MeasuredRank, work: Workload, storage: Storage, pp_rank: int, order: Sequence[Operation]
) -> RankEstimate:
    """What was measured on a rank of this kind, at this one's place in the schedule."""
    sizes = work.sizes
    stages = stages_of_rank(pp_rank, sizes.pp, sizes.vpp, sizes.schedule)
    traces = dict(zip(stages, measured.traces, strict=True))
    return RankEstimate(
        pp_rank=pp_rank,
        stages=stages,
        layers=measured.layers,
        parameters=measured.counts.local,
        stored=measured.counts.stored,
        memory=fullest_moment(measured.counts, storage, order, traces, work.hidden_bytes(measured.hidden_size)),
        sent=sent_in_a_step(measured, work, storage, stages),
    )
