"""What a configuration would need, without the devices that it is for: what ``nxdt plan`` prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from nxdt_core.config import ResolvedConfig
from nxdt_core.devices import PROFILES, DeviceProfile, profile_of
from nxdt_core.errors.launch import UnknownAccelerator
from nxdt_core.parallel.estimate import (
    Estimate,
    RankEstimate,
    Workload,
    estimate,
    needs_stand_ins,
    optimizer_bytes_per_element,
)
from nxdt_core.parallel.layout import LayoutOptions
from nxdt_core.parallel.mesh import ParallelMesh
from nxdt_core.parallel.rounding.policy import updates_rounded
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.torch_versions import memory_info
from nxdt_core.training import build
from nxdt_core.training.weights.average import AVERAGE_BYTES

__all__ = ["RunPlan", "accelerator_memory_bytes", "plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run and what it needs."""

    config: ResolvedConfig
    work: Workload
    estimate: Estimate
    memory_bytes: int | None
    """Of one device; None where it is not known."""

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.work.sizes.world_size

    @property
    def fits(self) -> bool | None:
        """Whether the fullest rank's memory suffices; None where it is not known."""
        return None if self.memory_bytes is None else self.estimate.fullest.memory.total <= self.memory_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able tree; sizes in bytes."""
        found = self.estimate
        return {
            "world_size": self.world_size,
            "mesh": self.work.sizes.as_dict(),
            "schedule": self.work.sizes.schedule,
            "zero_stage": self.work.sizes.zero_stage,
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
    """Estimate the run of ``config`` over ``trainer.devices`` x ``trainer.num_nodes`` processes.

    Args:
        config: checked.
        memory_bytes: of one device; None takes that of this machine's accelerator, if it has one.

    Raises:
        NxdtError: the run would not start.
    """
    run, policy = config.run, build.precision(config)
    sizes = run.distributed_strategy.mesh_sizes(run.trainer.devices * run.trainer.num_nodes)
    work = Workload(
        builder=build.model_builder(config),
        adapters=build.adapters(config),
        objective=build.objective(config),
        precision=policy,
        state_bytes=_state_bytes(config, policy) + (AVERAGE_BYTES if run.exp_manager.ema.enable else 0),
        stand_ins=_stand_ins(config, policy),
        sizes=sizes,
        options=LayoutOptions.of(run, _profile(run.trainer.accelerator), ParallelMesh(sizes, None)),
        micro_batch_size=run.data.micro_batch_size,
        global_batch_size=run.data.global_batch_size,
        seq_length=run.data.seq_length,
        saves_bfloat16=run.checkpoint.save_bf16,
        packed=bool(getattr(config.selected("data").config, "reset_attention_mask", False)),
    )
    return RunPlan(
        config=config,
        work=work,
        estimate=estimate(work),
        memory_bytes=accelerator_memory_bytes() if memory_bytes is None else memory_bytes,
    )


def accelerator_memory_bytes() -> int | None:
    """Memory of this machine's accelerator; None where it has none."""
    if not torch.accelerator.is_available():
        return None
    return memory_info()[1]


def _state_bytes(config: ResolvedConfig, policy: PrecisionPolicy) -> float:
    """Optimizer state by element. Over masters and over rounded weights the optimizer sees float32."""
    optimizer, rounding = config.selected("optimizer"), updates_rounded(policy, config.run.seed)
    wide = policy.master_weights or rounding is not None
    dtype = torch.float32 if wide else getattr(torch, policy.parameters)
    size = optimizer_bytes_per_element(optimizer.component.load_target(), optimizer.config, dtype)
    return size / 2 if rounding is not None and rounding.state == "bfloat16" else size


def _stand_ins(config: ResolvedConfig, policy: PrecisionPolicy) -> bool:
    """Whether weights are rounded by an optimizer that has no kernel for that."""
    optimizer = config.selected("optimizer")
    rounded = updates_rounded(policy, config.run.seed) is not None
    return rounded and needs_stand_ins(optimizer.component.load_target(), optimizer.config)


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


def _profile(accelerator: str) -> DeviceProfile:
    """The row of the device type that the run is for; ``auto`` is not known here, so it promises nothing."""
    if accelerator == "auto":
        return profile_of(torch.device("meta"))
    if accelerator not in PROFILES:
        raise UnknownAccelerator(accelerator=accelerator, known=tuple(PROFILES))
    return PROFILES[accelerator]
