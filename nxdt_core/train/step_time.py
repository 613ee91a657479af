"""How long a step would take on a product, from its data sheet and what an engine counts; no device is needed.

Computation takes its operations over the product's peak times an ``efficiency``: the share of the peak that kernels
reach. Traffic of a dimension takes its bytes over the slowest link on the way of its group. What an engine can send
while it computes counts only as far as it takes longer than that computation. Latencies, the optimizer's step, memory
traffic of small operations and the host are left out, so ``efficiency`` stands for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nxdt_core.distributed.devices import Links
from nxdt_core.protocols.parallel.estimate import Estimate
from nxdt_core.protocols.parallel.mesh import MeshSizes

__all__ = ["EFFICIENCY", "StepTime", "link_rate", "step_time"]

EFFICIENCY = 0.6
"""Assumed, not measured: published runs of dense models on H100 reach 40 to 60 % of the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step, by what they are spent on."""

    compute: float
    """Forward, backward and recomputation."""
    waiting: float
    """In a pipeline, for other stages."""
    exposed: Mapping[str, float]
    """Traffic that nothing is computed meanwhile, by mesh dimension."""
    efficiency: float
    tokens_per_second: float
    """Of one process."""
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
        sizes: of its mesh.
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
