"""What a run of any size would need, from one process without its devices: memory, traffic, idle time, sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from nxdt_core.engines.stages import stage_layers, stages_of_rank
from nxdt_core.parallel.data import check_sums, needs_sharding
from nxdt_core.parallel.estimate.memory import Storage, fullest_moment
from nxdt_core.parallel.estimate.rank import MeasuredRank, measure_rank
from nxdt_core.parallel.estimate.traffic import sent_in_a_step
from nxdt_core.parallel.estimate.weights import count_unique
from nxdt_core.parallel.estimate.workload import Workload
from nxdt_core.parallel.mesh import ParallelMesh
from nxdt_core.parallel.pipeline.schedules import Operation, bubble_fraction, schedule_operations
from nxdt_core.protocols.parallel.estimate import Estimate, RankEstimate
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["estimate"]


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
        layout=tuple(_layout(work)),
        ranks=tuple(ranks),
        compute_dtype=work.precision.autocast or work.precision.parameters,
        recomputed=_FORWARD if work.options.recompute_granularity == "full" else 0.0,
        hidden_behind=_hidden_behind(work, storage),
    )


_FORWARD = 1 / 3
"""Share of forward in the operations of a step: each matrix has one product in forward and two in backward."""


def _hidden_behind(work: Workload, storage: Storage) -> dict[str, float]:
    """Return the share of a step's computation that traffic can be hidden behind, by dimension.

    FSDP2 gathers a layer's weights during the layer before, and reduces its gradients during the next one's backward:
    in each micro-batch under ZeRO-2 and 3, else in the first and last. Without it gradients are summed during the last
    backward, in a pipeline after it. Messages between pipeline stages, and keys and values on a ring, go while other
    blocks are computed.
    """
    each_time = storage.zero_stage >= 2
    after = not storage.sharded and work.sizes.pp > 1
    found = {"pp": 1.0, "dp": 0.0 if after else 1.0 if each_time else 1 / work.micro_batches}
    if work.sizes.cp > 1 and work.options.context_parallel_method == "ring":
        found["cp"] = 1.0
    return found


def _checkpoint_bytes(work: Workload, storage: Storage, *, frozen: int, trained: int) -> int:
    saved = round(trained * (storage.saved_bytes(bfloat16=work.saves_bfloat16) + work.state_bytes))
    if not all(adapter.saves_base for adapter in work.adapters):
        return saved
    return saved + frozen * storage.saved_bytes(bfloat16=work.saves_bfloat16, frozen=True)


def _kinds(whole: nn.Module, plan: ParallelPlan, work: Workload) -> list[object]:
    """Return, by place in the pipeline, a key of ranks with equal stages; only one of a kind is measured."""
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


def _layout(work: Workload) -> Iterator[str]:
    sizes, options = work.sizes, work.options
    yield f"{sizes.world_size:,} {'rank' if sizes.world_size == 1 else 'ranks'}"
    named = {"TP": sizes.tp, "CP": sizes.cp, "EP": sizes.ep, "PP": sizes.pp, "VPP": sizes.vpp, "DP": sizes.dp}
    yield from (f"{name} {size}" for name, size in named.items() if size > 1)
    if options.sequence_parallel:
        yield "sequence parallel"
    if sizes.dp_replicate > 1:
        yield f"{sizes.dp_replicate} replicas"
    if sizes.dp > 1:
        yield f"ZeRO-{sizes.zero_stage}" if sizes.zero_stage else "no ZeRO"
    yield work.precision.name
    if options.recompute_granularity is not None:
        what = "layers" if options.recompute_granularity == "full" else ", ".join(options.recompute_names)
        yield f"recomputes {what}"
