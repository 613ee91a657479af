"""Estimates for a run of any size, made in one process without the run's devices: memory, traffic, idle time, sizes.

Traffic is the bytes that a rank sends in a step: what was measured on a micro-batch, and what comes once per step. They
are lower bounds by ring algorithms, as in :class:`nxdt_core.engine.estimate.trace.WireBytes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from nxdt_core.engine.data.fsdp import WeightStorage, product_weights
from nxdt_core.engine.decoding import records_passes
from nxdt_core.engine.estimate.memory import FIRST, LAST, HeldParameter, count_unique, peak_memory
from nxdt_core.engine.estimate.rank import MeasuredRank, Workload, measure_rank
from nxdt_core.engine.estimate.trace import ring_share
from nxdt_core.engine.expert import exchange_chunks, routers_of
from nxdt_core.engine.layout import part_costs, pipeline_cuts
from nxdt_core.engine.parameters import tables
from nxdt_core.engine.pipeline.schedules import Operation, bubble_fraction, schedule_operations, stage_costs
from nxdt_core.engine.pipeline.split import stage_layers
from nxdt_core.engine.weights import build_whole
from nxdt_core.models.patterns import modules_at
from nxdt_core.protocols.estimate import Estimate, Memory, RankEstimate
from nxdt_core.protocols.mesh import rank_of_stage, stages_of_rank
from nxdt_core.protocols.plan import ParallelPlan

_SCALE_BYTES = 4
"""Bytes of the scale of a weight that is sent in one byte per element; ranks find it together once per step."""


_FORWARD = 1 / 3
"""Share of forward in the operations of a step: each matrix has one product in forward and two in backward."""


def estimate(work: Workload) -> Estimate:
    """Build every kind of pipeline rank on the meta device in a fake process group, and measure a micro-batch on it.

    Raises:
        NxdtError: the model's plan does not allow the layout.
        ModelReadsValues: the model cannot run without values.
    """
    sizes, storage, parts, data = work.sizes, work.storage, work.parts, work.run.data
    built = build_whole(parts.builder, parts.adapters)
    whole, plan = built.module, built.plan
    cuts = pipeline_cuts(whole, plan, parts.builder, sizes, work.options)
    work = replace(work, options=replace(work.options, pipeline_cuts=cuts))
    layers: list[tuple[str, ...]] = []
    costs: list[int] | None = None
    if sizes.stages > 1 and plan.pipeline is not None:
        container = whole.get_submodule(plan.pipeline.layers)
        names = [f"{plan.pipeline.layers}.{key}" for key, _ in container.named_children()]
        layers = stage_layers(names, sizes.stages, cuts)
        if sizes.pp > 1:
            costs = stage_costs(part_costs(whole, plan, parts.builder, work.options), layers)
    of_ranks = Counter[int]()  # cost of the stages of each
    for stage, cost in enumerate(costs or [1]):
        of_ranks[rank_of_stage(stage, sizes.pp, sizes.schedule)] += cost
    orders = schedule_operations(sizes.schedule, sizes.pp, sizes.vpp, storage.micro_batches)
    measured: dict[object, MeasuredRank] = {}
    ranks = []
    for pp_rank, kind in enumerate(_kinds(whole, plan, work, layers)):
        if kind not in measured:
            measured[kind] = measure_rank(work, pp_rank)
        ranks.append(_of_rank(measured[kind], work, pp_rank, orders[pp_rank]))
    parameters, trained = count_unique(whole)
    chunks = min(exchange_chunks(whole, plan).values(), default=1) if sizes.ep > 1 else 1
    repeated, flops_per_token = 0.0, parts.builder.flops_per_token(data.seq_length)
    if work.options.recompute_granularity == "full":
        repeated = _FORWARD
    if parts.teacher is not None:  # which runs forward alone
        repeated += _FORWARD * parts.teacher.flops_per_token(data.seq_length) / flops_per_token
    hidden_behind, never_hidden = _overlap(whole, plan, work, chunks)
    return Estimate(
        parameters=parameters,
        trained=trained,
        micro_batches=storage.micro_batches,
        tokens_per_step=data.global_batch_size * data.seq_length * work.rows_per_sample,
        bubble=bubble_fraction(sizes.schedule, sizes.pp, sizes.vpp, storage.micro_batches, costs),
        stage_layers=tuple(map(len, layers)),
        pipeline_cuts=tuple(stage[-1] for stage in layers[:-1]),
        longest_rank=max(of_ranks.values()) * sizes.pp / (of_ranks.total() or 1),
        checkpoint_bytes=_checkpoint_bytes(work, whole, plan),
        flops_per_token=flops_per_token,
        layout=tuple(_layout(work)),
        ranks=tuple(ranks),
        compute_dtype=parts.precision.autocast or parts.precision.parameters,
        recomputed=repeated,
        hidden_behind=hidden_behind,
        never_hidden=never_hidden,
    )


def _overlap(
    whole: nn.Module, plan: ParallelPlan, work: Workload, chunks: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the share of a step's computation that traffic can be hidden behind, and the share of the traffic that
    ranks wait for in any case, by dimension.

    FSDP2 gathers a layer's weights during the layer before, and reduces its gradients during the next one's backward:
    in each micro-batch under ZeRO-2 and 3, else in the first and last. Without it gradients are summed during the last
    backward, in a pipeline after it. Messages between pipeline stages, and keys and values on a ring, go while other
    blocks are computed. With asynchronous tensor parallelism, parts travel during the products that need the others.
    Of a collective that a product has taken in, ranks wait for the part of one rank; the reduce-scatters of gradients
    before column layers are sums of several products, which take none in: two of a layer's eight collectives, or of
    twelve where it is recomputed.

    Of an exchange with experts in chunks, ranks wait for one chunk: the first on its way there and the last on its way
    back. While experts compute one chunk, another one travels.
    """
    storage = work.storage
    after, zero_stage = not storage.sharded and work.sizes.pp > 1, work.sizes.zero_stage
    behind = {"pp": 1.0, "dp": 0.0 if after else 1.0 if zero_stage >= 2 else 1 / storage.micro_batches}
    never: dict[str, float] = {}
    if chunks > 1:
        never["ep"] = 1 / chunks
    if work.options.async_tensor_parallel:
        behind["tp"] = 1.0
        alone = 2 / (12 if work.options.recompute_granularity == "full" else 8)
        never["tp"] = alone + (1 - alone) / work.sizes.tp
    if work.sizes.cp > 1 and work.options.context_parallel_method == "ring":
        behind["cp"] = 1.0
    if chunks > 1:
        elements = 0.0  # of experts that a token is multiplied with
        routers = routers_of(whole, plan).items()
        for part, (router, experts) in zip(modules_at(whole, plan.experts.modules).values(), routers, strict=False):
            size = sum(parameter.numel() for parameter in part.parameters())
            elements += size * getattr(whole.get_submodule(router), "top_k", 1) / experts
        behind["ep"] = 6 * elements / work.parts.builder.flops_per_token(work.run.data.seq_length)
    return behind, never


def _checkpoint_bytes(work: Workload, whole: nn.Module, plan: ParallelPlan) -> int:
    storage, (parameters, trained), others = work.storage, count_unique(whole), tables([whole], plan)
    updated = [(name, tuple(p.shape)) for name, p in whole.named_parameters() if p.requires_grad]
    state = sum(work.state(shape, name not in others).saved for name, shape in updated)

    def saved_bytes(stored: int) -> int:  # of an element; wider weights are saved in bfloat16, too, where that is asked
        return stored + (2 if work.run.checkpoint.save_bf16 and stored > 2 else 0)

    saved = round(trained * saved_bytes(storage.stored_bytes) + state)
    coded = work.options.base_dtype is not None
    if trained == parameters or coded or not all(adapter.saves_base for adapter in work.parts.adapters):
        return saved
    frozen = {name: p.numel() for name, p in whole.named_parameters() if not p.requires_grad}
    two_byte = sum(frozen[name] for name in product_weights(whole, plan) & frozen.keys())
    saved += two_byte * saved_bytes(storage.product_bytes)
    return saved + (parameters - trained - two_byte) * saved_bytes(storage.compute_bytes)


def _kinds(whole: nn.Module, plan: ParallelPlan, work: Workload, layers: Sequence[Sequence[str]]) -> list[object]:
    """Return, by place in the pipeline, a key of ranks with equal stages; only one of a kind is measured."""
    sizes = work.sizes
    if not layers:
        return [None] * sizes.pp
    shapes = [
        tuple(tuple((leaf, p.shape) for leaf, p in whole.get_submodule(name).named_parameters()) for name in stage)
        for stage in layers
    ]
    return [
        tuple((number == 0, number == sizes.stages - 1, shapes[number]) for number in stages)
        for stages in (stages_of_rank(rank, sizes.pp, sizes.vpp, sizes.schedule) for rank in range(sizes.pp))
    ]


def _of_rank(measured: MeasuredRank, work: Workload, pp_rank: int, order: Sequence[Operation]) -> RankEstimate:
    """Return the estimate of one rank: measurements of a rank of this kind, at this one's place in the schedule."""
    sizes = work.sizes
    stages = stages_of_rank(pp_rank, sizes.pp, sizes.vpp, sizes.schedule)
    traces = dict(zip(stages, measured.traces, strict=True))
    storage, teacher = work.storage, measured.teacher
    memory = peak_memory(measured.held, storage, order, traces, measured.received, stand_ins=work.stand_ins)
    if work.parts.teacher is not None:
        # A second model runs when the logits of a micro-batch are there. In a pipeline it runs before the step, and
        # what is kept of its logits waits for all micro-batches; the trace has counted one.
        last, alone = measured.traces[-1], sizes.pp == 1
        beyond = last.kept + teacher.workspace - sum(last.peak.values()) if alone else 0
        waiting = 0 if alone else (storage.micro_batches - 1) * teacher.logits
        memory = replace(
            memory,
            weights=memory.weights + teacher.weights,
            logits=memory.logits + waiting,
            workspace=memory.workspace + max(beyond, 0),
        )
    if records_passes(sizes, sharded=storage.sharded) and work.records:
        memory = replace(memory, cache=measured.cache)
    else:  # it is freed before the step
        writing = Memory(weights=memory.weights, optimizer=memory.optimizer, cache=measured.cache)
        memory = max(memory, writing, key=lambda moment: moment.total)
    return RankEstimate(
        pp_rank=pp_rank,
        stages=stages,
        layers=measured.layers,
        parameters=sum(p.local for p in measured.held),
        stored=sum(p.stored for p in measured.held),
        memory=memory,
        sent=sent_in_a_step(measured, work, stages),
    )


def _layout(work: Workload) -> Iterator[str]:
    sizes, options = work.sizes, work.options
    yield f"{sizes.world_size:,} {'rank' if sizes.world_size == 1 else 'ranks'}"
    named = {"TP": sizes.tp, "CP": sizes.cp, "EP": sizes.ep, "PP": sizes.pp, "VPP": sizes.vpp, "DP": sizes.dp}
    yield from (f"{name} {size}" for name, size in named.items() if size > 1)
    if options.sequence_parallel:
        yield "sequence parallel, gathered again" if options.regathers else "sequence parallel"
    if options.async_tensor_parallel:
        yield "asynchronous TP"
    if sizes.dp_replicate > 1:
        yield f"{sizes.dp_replicate} replicas"
    if sizes.dp > 1:
        yield f"ZeRO-{sizes.zero_stage}" if sizes.zero_stage else "no ZeRO"
    yield work.parts.precision.name
    if options.base_dtype is not None:
        yield f"base in {options.base_dtype}"
    if options.recompute_granularity is not None:
        what = "layers" if options.recompute_granularity == "full" else ", ".join(options.recompute_names)
        yield f"recomputes {what}"


def sent_in_a_step(measured: MeasuredRank, work: Workload, stages: tuple[int, ...]) -> Mapping[str, int]:
    """Return the bytes by dimension (``tp``, ``cp``, ``ep``, ``token_shuffle``, ``pp``, ``dp``), without those that
    send none."""
    sent: Counter[str] = Counter()
    for trace in measured.traces:
        for dimension, size in trace.sent.items():
            sent[dimension] += size * work.storage.micro_batches
    hops, sizes = 0, work.sizes  # messages that leave the rank: hidden states onwards, their gradients back
    for stage in stages:
        neighbours = [other for other in (stage - 1, stage + 1) if 0 <= other < sizes.stages]
        here = rank_of_stage(stage, sizes.pp, sizes.schedule)
        hops += sum(rank_of_stage(other, sizes.pp, sizes.schedule) != here for other in neighbours)
    sent["pp"] += hops * measured.received * work.storage.micro_batches
    partial = sum(p.local for p in measured.held if p.partial)
    sent["tp"] += round(2 * ring_share(work.sizes.tp) * partial * work.storage.gradient_bytes)
    sent["dp"] += round(sum(_data(measured.held, work.storage)))
    return {dimension: size for dimension, size in sent.items() if size}


def _data(held: Sequence[HeldParameter], storage: WeightStorage) -> Iterator[float]:
    """Gathering weights and reducing gradients over the ranks that hold the same part of the model."""
    sizes, micro_batches = storage.sizes, storage.micro_batches
    gathers = 2 * micro_batches if sizes.zero_stage == 3 else 1
    for experts, ranks in ((False, sizes.fsdp), (True, sizes.efsdp)):
        gradients = sum(p.local for p in held if p.expert == experts and p.trained) * storage.gradient_bytes
        if not storage.sharded:
            yield 2 * ring_share(ranks * sizes.dp_replicate) * gradients
            continue
        gathered = [p for p in held if p.expert == experts and not (p.scaled or p.coded)]
        yield ring_share(ranks) * gathers * _gathered_bytes(gathered, storage)
        yield ring_share(ranks) * gradients * (micro_batches if sizes.zero_stage >= 2 else 1)
        yield 2 * ring_share(sizes.dp_replicate) * gradients / ranks
    if storage.sharded:
        scaled = [p.local for p in held if p.scaled]
        yield ring_share(sizes.fsdp) * gathers * sum(scaled)
        yield 2 * ring_share(sizes.fsdp) * len(scaled) * _SCALE_BYTES
    if storage.sharded and sizes.zero_stage == 3:  # the ends are gathered in forward alone
        ends = [p for p in held if p.group in (FIRST, LAST) and not p.coded]
        yield -ring_share(sizes.fsdp) * micro_batches * _gathered_bytes(ends, storage)


def _gathered_bytes(gathered: Sequence[HeldParameter], storage: WeightStorage) -> int:
    """Return the bytes of weights that are gathered, some of them in autocast's dtype."""
    return sum(p.local * (storage.product_bytes if p.two_byte else storage.compute_bytes) for p in gathered)
