"""Estimate of what a configuration needs, made without the devices that it is for; ``nxdt plan`` prints it.

The time of a step follows from the data sheet of a product and what an engine counts. Computation takes its operations
over the product's peak times an ``efficiency``: the share of the peak that kernels reach. Traffic of a dimension takes
its bytes over the slowest link on the way of its group. What an engine can send while it computes counts only as far as
it takes longer than that computation. Latencies, the optimizer's step, memory traffic of small operations and the host
are left out, so ``efficiency`` stands for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.device_settings import register_profile_of
from nxdt_core.distributed.devices import PROFILES, Links, available_type
from nxdt_core.errors.launch import UnknownDevice
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.estimate import Estimate, RankEstimate, RunParts
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.train import build
from nxdt_core.train.weights.average import AVERAGE_BYTES
from nxdt_core.train.weights.found import teacher_run

EFFICIENCY = 0.6
"""Assumed, not measured: published runs of dense models on H100 reach 40 to 60 % of the peak."""


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


_TIGHT = 0.9
"""Share of a device's memory."""


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
        run = self.config.run
        return run.distributed_strategy.mesh_sizes(run.trainer.devices * run.trainer.num_nodes)

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
        found, sizes = self.estimate, self.sizes
        return {
            "world_size": sizes.world_size,
            "mesh": sizes.as_dict(),
            "schedule": sizes.schedule,
            "zero_stage": sizes.zero_stage,
            "parameters": found.parameters,
            "trained_parameters": found.trained,
            "micro_batches": found.micro_batches,
            "tokens_per_step": found.tokens_per_step,
            "pipeline_bubble": found.bubble,
            "pipeline_cuts": list(found.pipeline_cuts),
            "pipeline_longest_rank": found.longest_rank,
            "checkpoint_bytes": found.checkpoint_bytes,
            "flops_per_token": found.flops_per_token,
            "flops_per_step": found.flops_per_step,
            "ranks": [_rank(rank) for rank in found.ranks],
            "fullest_pp_rank": found.fullest.pp_rank,
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
    known = None if product is None else product_of(config, product)
    engine = config.selected("engine").component.load_class(ParallelEngine)
    if known is not None:
        engine.check_product(config, known.name)
    with build.plan_errors_named(config):
        estimate = engine.estimate(config, run_parts(config))
    if memory_bytes is None:
        memory_bytes = accelerator_memory_bytes() if known is None else round(known.memory_gib * 2**30)
    name = None if known is None else known.name
    made = RunPlan(config=config, estimate=estimate, memory_bytes=memory_bytes, product=name)
    peak = None if known is None else known.peak_flops.get(estimate.compute_dtype)
    if known is None or peak is None or known.links is None:
        return made
    found = step_time(estimate, made.sizes, peak_flops=peak, links=known.links, efficiency=efficiency)
    return replace(made, step_time=found)


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


def accelerator_memory_bytes() -> int | None:
    """Return the memory of this machine's accelerator; None where it has none."""
    return PROFILES[available_type()].operations.total_memory_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Share of a product that one process has."""

    name: str
    memory_gib: float
    peak_flops: Mapping[str, float]
    """Peak FLOP/s by dtype."""
    links: Links | None


def product_of(config: ResolvedConfig, device: str) -> Product:
    """Return the product of that name, in any case of letters, that a device profile knows, such as ``trn2``.

    Raises:
        UnknownDevice: none does.
    """
    register_profile_of(config)
    known = {name: profile for profile in PROFILES.values() for name in profile.memory_gib}
    name = next((name for name in known if name.lower() == device.lower()), None)
    if name is None:
        raise UnknownDevice(device=device, known=tuple(known))
    profile = known[name]
    return Product(
        name=name,
        memory_gib=profile.memory_gib[name],
        peak_flops=profile.peak_flops.get(name, {}),
        links=profile.links.get(name),
    )


def _rank(rank: RankEstimate) -> dict[str, Any]:
    return {
        "pp_rank": rank.pp_rank,
        "stages": list(rank.stages),
        "layers": rank.layers,
        "parameters": rank.parameters,
        "stored_parameters": rank.stored,
        "memory_bytes": {**asdict(rank.memory), "total": rank.memory.total},
        "sent_bytes_per_step": dict(rank.sent),
    }
