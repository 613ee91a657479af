"""Estimate of what a configuration needs, made without the devices that it is for; ``nxdt plan`` prints it.

The time of a step follows from the data sheet of a product and what an engine counts. Computation takes its operations
over the product's peak times an ``efficiency``: the share of the peak that kernels reach. Traffic of a dimension takes
its bytes over the slowest link on the way of its group. What an engine can send while it computes counts only as far as
it takes longer than that computation. Latencies, the optimizer's step, memory traffic of small operations and the host
are left out, so ``efficiency`` stands for all of them.

The candidates of ``--search`` are all sizes of tensor, pipeline, context and expert parallelism that are powers of two,
each with ZeRO-1 and ZeRO-3 and with less and more recomputation, or inputs of tensor blocks that are gathered again.
Each passes the checks and the estimate of one layout, so the search contains no rules about models and engines: it
leaves out what they refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product as combinations
from typing import Any

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.devices import PROFILES, DeviceProfile, Links, available_type, register_profile_of
from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.launch import NoLayoutFits, NoTimesOfDevice, UnknownDevice
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.estimate import Estimate, RunParts
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.train import build
from nxdt_core.train.weights.average import AVERAGE_BYTES
from nxdt_core.train.weights.loading import teacher_run

EFFICIENCY = 0.6
"""Assumed, not measured: published runs of dense models on H100 reach 40 to 60 % of the peak."""
_TIGHT = 0.9
"""Share of a device's memory."""
_STRATEGY = "distributed_strategy"
_REGATHER = f"{_STRATEGY}.sequence_parallel_regather"
_TOKENS_PER_CONTEXT_RANK = 8192
"""A sequence is divided only as long as each rank keeps that many tokens of it: less costs more than it saves."""
_MOST_TENSOR, _MOST = 8, 16
"""Ranks that share a layer's matrices; stages of a pipeline, and ranks that share the experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step, by what they are spent on."""

    compute: float
    """Forward, backward and recomputation."""
    waiting: float
    """Waiting for other stages of a pipeline."""
    exposed: Mapping[str, float]
    """Traffic that nothing is computed meanwhile, by mesh dimension."""
    efficiency: float
    tokens_per_second: float
    """Tokens per second of one process."""
    mfu: float
    """Model FLOP/s over the peak, recomputation not counted."""

    @property
    def total(self) -> float:
        """Return the sum of all parts in seconds."""
        return self.compute + self.waiting + sum(self.exposed.values())


def step_time(
    estimate: Estimate, sizes: MeshSizes, *, peak_flops: float, links: Links, efficiency: float = EFFICIENCY
) -> StepTime:
    """Return how long a step would take.

    Args:
        estimate: of the run.
        sizes: sizes of the run's device mesh.
        peak_flops: dense FLOP/s of one process in the run's compute dtype.
        links: between its processes.
        efficiency: share of the peak that kernels reach.
    """
    model_flops = estimate.flops_per_step / sizes.world_size
    compute = model_flops * (1 + estimate.recomputed) / (peak_flops * efficiency)
    exposed: dict[str, float] = {}
    for rank in estimate.ranks:
        for dimension, size in rank.sent.items():
            seconds = size / link_rate(dimension, sizes, links)
            beyond = seconds - compute * estimate.hidden_behind.get(dimension, 0.0)
            always = seconds * estimate.never_hidden.get(dimension, 0.0)
            exposed[dimension] = max(exposed.get(dimension, 0.0), beyond, always)
    waiting = compute * estimate.bubble / (1 - estimate.bubble)
    total = compute + waiting + sum(exposed.values())
    return StepTime(
        compute=compute,
        waiting=waiting,
        exposed=exposed,
        efficiency=efficiency,
        tokens_per_second=estimate.tokens_per_step / sizes.world_size / total,
        mfu=model_flops / peak_flops / total,
    )


def link_rate(dimension: str, sizes: MeshSizes, links: Links) -> float:
    """Return the bytes per second at which a process sends within its group of a mesh dimension.

    Neighbours along ``tp`` are neighbouring processes, those along ``pp`` are furthest apart. A ring through several
    machines leaves each of them as often as the machine has members, through as many adapters.
    """
    stride, size = {
        "tp": (1, sizes.tp),
        "cp": (sizes.tp, sizes.cp),
        "ep": (sizes.tp, sizes.ep),
        "dp": (sizes.tp, sizes.fsdp * sizes.dp_replicate),
        "pp": (sizes.world_size // sizes.pp, 2),
    }.get(dimension, (sizes.tp, sizes.fsdp))
    if stride * (size - 1) < links.processes:
        return links.inside
    members = max(links.processes // stride, 1)
    return min(links.inside, links.outside * members)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run and what it needs."""

    config: ResolvedConfig
    estimate: Estimate
    memory_bytes: int | None
    """Memory of one device; None if it is not known."""
    product: str | None = None
    """Name of the product that the run is planned for."""
    step_time: StepTime | None = None
    """Estimated time of a step; None where the product, its peak or its links are not known."""

    @property
    def sizes(self) -> MeshSizes:
        """Return the sizes of the run's parallel dimensions."""
        return self.config.run.mesh_sizes()

    @property
    def fits(self) -> bool | None:
        """True if the memory of the fullest rank suffices; None if it is not known."""
        return None if self.memory_bytes is None else self.estimate.fullest.memory.total <= self.memory_bytes

    @property
    def tight(self) -> bool | None:
        """True if so little memory is left that fragments, kernels and libraries may exceed it; None if it is not
        known."""
        return None if self.memory_bytes is None else self.estimate.fullest.memory.total > _TIGHT * self.memory_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the plain JSON-able tree; sizes in bytes."""
        estimate, sizes = self.estimate, self.sizes
        return {
            "world_size": sizes.world_size,
            "mesh": sizes.as_dict(),
            "schedule": sizes.schedule,
            "zero_stage": sizes.zero_stage,
            "parameters": estimate.parameters,
            "trained_parameters": estimate.trained,
            "micro_batches": estimate.micro_batches,
            "tokens_per_step": estimate.tokens_per_step,
            "pipeline_bubble": estimate.bubble,
            "pipeline_cuts": list(estimate.pipeline_cuts),
            "pipeline_longest_rank": estimate.longest_rank,
            "checkpoint_bytes": estimate.checkpoint_bytes,
            "flops_per_token": estimate.flops_per_token,
            "flops_per_step": estimate.flops_per_step,
            "ranks": [
                {
                    "pp_rank": rank.pp_rank,
                    "stages": list(rank.stages),
                    "layers": rank.layers,
                    "parameters": rank.parameters,
                    "stored_parameters": rank.stored,
                    "memory_bytes": {**asdict(rank.memory), "total": rank.memory.total},
                    "sent_bytes_per_step": dict(rank.sent),
                }
                for rank in estimate.ranks
            ],
            "fullest_pp_rank": estimate.fullest.pp_rank,
            "memory_bytes": self.memory_bytes,
            "product": self.product,
            "fits": self.fits,
            "step_seconds": None
            if self.step_time is None
            else {**asdict(self.step_time), "total": self.step_time.total},
        }


def plan(
    config: ResolvedConfig,
    *,
    memory_bytes: int | None = None,
    product: str | None = None,
    efficiency: float = EFFICIENCY,
) -> RunPlan:
    """Ask the run's engine for an estimate over ``trainer.devices`` x ``trainer.num_nodes`` processes.

    Args:
        config: checked.
        memory_bytes: of one device; None takes that of ``product``, or of this machine's accelerator, if it has one.
        product: name of a product that a device profile knows, such as ``H100``: for its memory and the time of a step.
        efficiency: share of the product's peak that kernels reach.

    Raises:
        EngineWithoutEstimate: the engine gives none.
        UnknownDevice: no profile knows ``product``.
        NxdtError: the run would not start, or machines of the product cannot run it.
    """
    profile, name = (None, None) if product is None else product_of(config, product)
    engine = config.selected("engine").component.load_class(ParallelEngine)
    if name is not None:
        engine.check_product(config, name)
    with build.plan_errors_named(config):
        estimate = engine.estimate(config, run_parts(config))
    if profile is None or name is None:
        if memory_bytes is None:  # that of this machine's accelerator
            memory_bytes = PROFILES[available_type()].operations.total_memory_bytes()
        return RunPlan(config=config, estimate=estimate, memory_bytes=memory_bytes)
    if memory_bytes is None:
        memory_bytes = round(profile.memory_gib[name] * 2**30)
    run_plan = RunPlan(config=config, estimate=estimate, memory_bytes=memory_bytes, product=name)
    peak, links = profile.peak_flops.get(name, {}).get(estimate.compute_dtype), profile.links.get(name)
    if peak is None or links is None:
        return run_plan
    seconds = step_time(estimate, run_plan.sizes, peak_flops=peak, links=links, efficiency=efficiency)
    return replace(run_plan, step_time=seconds)


def run_parts(config: ResolvedConfig) -> RunParts:
    """Return what an engine needs of a run's components for its estimate."""
    objective = build.objective(config)
    taught = teacher_run(objective, config) if objective.teacher is not None else None
    return RunParts(
        builder=build.model_builder(config),
        teacher=None if taught is None else build.model_builder(taught),
        adapters=build.adapters(config),
        objective=objective,
        precision=build.precision(config),
        extra_state_bytes=AVERAGE_BYTES if config.run.exp_manager.ema.enable else 0,
    )


def product_of(config: ResolvedConfig, device: str) -> tuple[DeviceProfile, str]:
    """Return the device profile that knows a product, such as ``trn2``, and its name there, in any case of letters.

    Raises:
        UnknownDevice: none does.
    """
    register_profile_of(config)
    profiles = {name: profile for profile in PROFILES.values() for name in profile.memory_gib}
    name = next((name for name in profiles if name.lower() == device.lower()), None)
    if name is None:
        raise UnknownDevice(device=device, known=tuple(profiles))
    return profiles[name], name


@dataclass(frozen=True, slots=True)
class Layout:
    """One candidate."""

    tp: int
    pp: int
    cp: int
    ep: int

    @property
    def ranks(self) -> int:
        """Return how many ranks hold one copy of the model."""
        return self.tp * self.pp * self.cp

    def settings(self, zero_stage: int, recompute: Mapping[str, str]) -> dict[str, str]:
        """Return the keys that select it, with their values as they are written in an override."""
        return {
            f"{_STRATEGY}.tensor_model_parallel_size": str(self.tp),
            f"{_STRATEGY}.pipeline_model_parallel_size": str(self.pp),
            f"{_STRATEGY}.virtual_pipeline_model_parallel_size": "1",
            f"{_STRATEGY}.pipeline_schedule": "null",
            f"{_STRATEGY}.context_parallel_size": str(self.cp),
            f"{_STRATEGY}.expert_model_parallel_size": str(self.ep),
            f"{_STRATEGY}.sequence_parallel": "true" if self.tp > 1 else "false",
            f"{_STRATEGY}.zero_stage": str(zero_stage),
            **recompute,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedLayout:
    """A layout that fits."""

    settings: Mapping[str, str]
    plan: RunPlan

    @property
    def seconds(self) -> float:
        """Return the estimated time of a step."""
        assert self.plan.step_time is not None
        return self.plan.step_time.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Result of a search."""

    as_configured: RunPlan
    """The configuration as it is."""
    ranked: Sequence[RankedLayout]
    """Layouts that fit, fastest first. ZeRO-3 is among them only where it is faster than ZeRO-1 or fits alone."""
    estimated: int
    refused: int
    """Combinations that the model, the engine or the sizes of the run do not allow."""

    def to_dict(self) -> dict[str, Any]:
        """Return the plain JSON-able tree."""
        return {
            "given": self.as_configured.to_dict(),
            "found": [{"settings": dict(layout.settings), **layout.plan.to_dict()} for layout in self.ranked],
            "estimated": self.estimated,
            "refused": self.refused,
        }


def search(
    load: Callable[[Sequence[str]], ResolvedConfig],
    *,
    product: str,
    efficiency: float = EFFICIENCY,
    trying: Callable[[int, int], None] = lambda number, count: None,
) -> Search:
    """Estimate every candidate and rank those that leave some memory free.

    Args:
        load: returns the run's configuration with overrides of its keys.
        product: name of a product that a device profile knows with its links, such as ``H200``.
        efficiency: share of the product's peak that kernels reach.
        trying: called before each combination of sizes with its number, from 1, and how many there are.

    Raises:
        NoTimesOfDevice: the product's links, or its peak in the run's dtype, are not known.
        NoLayoutFits: all candidates need more memory than there is.
        UnknownDevice: no profile knows ``product``.
        NxdtError: the configuration as it is would not start.
    """
    as_configured = plan(load(()), product=product, efficiency=efficiency)
    if as_configured.step_time is None:
        raise NoTimesOfDevice(device=as_configured.product or product, dtype=as_configured.estimate.compute_dtype)

    # Settings of recomputation, the fastest first: nothing, inputs that are gathered again, what the configuration
    # selects, whole layers.
    granularity, names = "model.activations_checkpoint_granularity", "model.activations_checkpoint_recompute"
    selected = as_configured.config.run.model.activations_checkpoint_recompute
    nothing = {granularity: "null", names: "null", _REGATHER: "false"}
    some = [{**nothing, granularity: "selective", names: f"[{','.join(selected)}]"}] if selected else []
    recomputations = [nothing, {**nothing, _REGATHER: "true"}, *some, {**nothing, granularity: "full"}]
    fitting, estimated, refused = list[RankedLayout](), 0, 0

    def least_recomputing(layout: Layout, zero_stage: int) -> RankedLayout | None:
        nonlocal estimated, refused
        for recompute in recomputations:
            if layout.tp == 1 and recompute[_REGATHER] == "true":
                continue
            settings = layout.settings(zero_stage, recompute)
            try:
                config = load([f"{key}={value}" for key, value in settings.items()])
                made = plan(config, product=product, efficiency=efficiency)
            except NxdtError:
                if recompute[_REGATHER] == "true":
                    continue  # not every engine gathers inputs again
                refused += 1
                return None  # for its sizes, which recomputing does not change
            estimated += 1
            if made.fits and not made.tight:
                return RankedLayout(settings=settings, plan=made)
            memory, limit = made.estimate.fullest.memory, made.memory_bytes
            if limit is not None and memory.weights + memory.gradients + memory.optimizer > limit:
                return None  # recomputing saves activations only
        return None

    layouts = list(candidates(as_configured.config))
    for number, layout in enumerate(layouts, start=1):
        trying(number, len(layouts))
        first = least_recomputing(layout, 1)
        if first is not None:
            fitting.append(first)
        # Where ZeRO-1 has to recompute, ZeRO-3 is tried, too: it sends more, and leaves more memory.
        recomputes = first is None or not recomputations[0].items() <= first.settings.items()
        if layout.ranks < as_configured.sizes.world_size and recomputes:
            other = least_recomputing(layout, 3)
            if other is not None and (first is None or other.seconds < first.seconds):
                fitting.append(other)
    if not fitting:
        raise NoLayoutFits(device=as_configured.product or product, tried=estimated)
    ranked = sorted(fitting, key=lambda layout: layout.seconds)
    return Search(as_configured=as_configured, ranked=ranked, estimated=estimated, refused=refused)


def candidates(config: ResolvedConfig) -> Iterator[Layout]:
    """Yield sizes to try, those that divide a layer's matrices least first."""
    run = config.run
    world = run.trainer.devices * run.trainer.num_nodes
    context = max(run.data.seq_length // _TOKENS_PER_CONTEXT_RANK, run.distributed_strategy.context_parallel_size)
    has_experts = "ep" in config.selected("model").component.record.capabilities
    for tp, pp, cp, ep in combinations(
        _powers_of_two(min(world, run.trainer.devices, _MOST_TENSOR)),
        _powers_of_two(min(world, _MOST)),
        _powers_of_two(min(world, context)),
        _powers_of_two(min(world, _MOST) if has_experts else 1),
    ):
        layout = Layout(tp, pp, cp, ep)
        if world % layout.ranks == 0:
            yield layout


def _powers_of_two(most: int) -> list[int]:
    return [1 << bits for bits in range(most.bit_length())]
