"""What a configuration would need, without the devices that it is for: what ``nxdt plan`` prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nxdt_core.config import ResolvedConfig
from nxdt_core.devices import PROFILES, available_type
from nxdt_core.distributed.device_profiles import register_profile_of
from nxdt_core.errors.launch import EngineWithoutEstimate, UnknownDevice
from nxdt_core.protocols.parallel.estimate import Estimate, EstimatesRuns, RankEstimate, RunParts
from nxdt_core.protocols.parallel.mesh import MeshSizes
from nxdt_core.training import build
from nxdt_core.training.weights.average import AVERAGE_BYTES

__all__ = ["RunPlan", "accelerator_memory_bytes", "memory_of_device", "plan", "run_parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run and what it needs."""

    config: ResolvedConfig
    estimate: Estimate
    memory_bytes: int | None
    """Of one device; None where it is not known."""

    @property
    def sizes(self) -> MeshSizes:
        """Return the sizes of the run's parallel dimensions."""
        run = self.config.run
        return run.distributed_strategy.mesh_sizes(run.trainer.devices * run.trainer.num_nodes)

    @property
    def fits(self) -> bool | None:
        """Whether the fullest rank's memory suffices; None where it is not known."""
        return None if self.memory_bytes is None else self.estimate.fullest.memory.total <= self.memory_bytes

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
            "checkpoint_bytes": found.checkpoint_bytes,
            "flops_per_token": found.flops_per_token,
            "flops_per_step": found.flops_per_step,
            "ranks": [_rank(rank) for rank in found.ranks],
            "fullest_pp_rank": found.fullest.pp_rank,
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
        }


def plan(config: ResolvedConfig, *, memory_bytes: int | None = None) -> RunPlan:
    """Ask the run's engine for an estimate over ``trainer.devices`` x ``trainer.num_nodes`` processes.

    Args:
        config: checked.
        memory_bytes: of one device; None takes that of this machine's accelerator, if it has one.

    Raises:
        EngineWithoutEstimate: the engine gives none.
        NxdtError: the run would not start.
    """
    selected = config.selected("parallel_engine").component
    engine = selected.load_target()
    if not isinstance(engine, EstimatesRuns):
        raise EngineWithoutEstimate(engine=selected.record.name, dist=selected.dist)
    with build.plan_errors_named(config):
        estimate = engine.estimate(config, run_parts(config))
    return RunPlan(
        config=config,
        estimate=estimate,
        memory_bytes=accelerator_memory_bytes() if memory_bytes is None else memory_bytes,
    )


def run_parts(config: ResolvedConfig) -> RunParts:
    """Return what an engine needs of a run's components for its estimate."""
    return RunParts(
        builder=build.model_builder(config),
        adapters=build.adapters(config),
        objective=build.objective(config),
        precision=build.precision(config),
        extra_state_bytes=AVERAGE_BYTES if config.run.exp_manager.ema.enable else 0,
    )


def accelerator_memory_bytes() -> int | None:
    """Return the memory of this machine's accelerator; None where it has none."""
    return PROFILES[available_type()].operations.total_memory_bytes()


def memory_of_device(config: ResolvedConfig, device: str) -> float:
    """Return the memory in GiB that one process has on a product that a device profile knows, such as ``trn2``.

    Raises:
        UnknownDevice: none does.
    """
    register_profile_of(config)
    known = {name: size for profile in PROFILES.values() for name, size in profile.memory_gib.items()}
    by_lower = {name.lower(): size for name, size in known.items()}
    if device.lower() not in by_lower:
        raise UnknownDevice(device=device, known=tuple(known))
    return by_lower[device.lower()]


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
