"""The estimate of a configured run: :meth:`nxdt_core.engine.engine.TorchEngine.estimate`."""

from __future__ import annotations

from dataclasses import replace

import torch

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.device_settings import register_profile_of
from nxdt_core.distributed.devices import PROFILES, DeviceProfile, available_type, profile_of
from nxdt_core.engine.estimate.run import estimate
from nxdt_core.engine.estimate.weights import StateOf, needs_stand_ins, optimizer_state
from nxdt_core.engine.estimate.workload import Workload
from nxdt_core.engine.layout import LayoutOptions
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.rounding.policy import updates_rounded
from nxdt_core.protocols.parallel.estimate import Estimate, RunParts
from nxdt_core.protocols.precision import PrecisionPolicy

__all__ = ["estimate_configured", "workload"]


def estimate_configured(config: ResolvedConfig, parts: RunParts) -> Estimate:
    """Estimate the run of ``config``.

    Raises:
        NxdtError: the run would not start.
    """
    return estimate(workload(config, parts))


def workload(config: ResolvedConfig, parts: RunParts) -> Workload:
    """Sizes of the run of ``config``."""
    register_profile_of(config)
    run = config.run
    sizes = run.distributed_strategy.mesh_sizes(run.trainer.devices * run.trainer.num_nodes)
    return Workload(
        builder=parts.builder,
        adapters=parts.adapters,
        objective=parts.objective,
        precision=parts.precision,
        state=_state(config, parts),
        stand_ins=_stand_ins(config, parts.precision),
        sizes=sizes,
        options=LayoutOptions.of(run, _profile(run.trainer.accelerator), ParallelMesh(sizes, None)),
        micro_batch_size=run.data.micro_batch_size,
        global_batch_size=run.data.global_batch_size,
        seq_length=run.data.seq_length,
        saves_bfloat16=run.checkpoint.save_bf16,
        packed=bool(getattr(config.selected("dataset").config, "reset_attention_mask", False)),
    )


def _state(config: ResolvedConfig, parts: RunParts) -> StateOf:
    """Measures optimizer state. Over masters and over rounded weights the optimizer sees float32."""
    policy = parts.precision
    optimizer, rounding = config.selected("optimizer"), updates_rounded(policy, config.run.seed)
    wide = policy.master_weights or rounding is not None
    dtype = torch.float32 if wide else getattr(torch, policy.parameters)
    narrow = rounding is not None and rounding.state == "bfloat16"
    factory, more = optimizer.component.load_target(), parts.extra_state_bytes
    return optimizer_state(factory, optimizer.config, dtype, narrow=narrow, more=more)


def _stand_ins(config: ResolvedConfig, policy: PrecisionPolicy) -> bool:
    """Whether weights are rounded by an optimizer that has no kernel for that."""
    optimizer = config.selected("optimizer")
    rounded = updates_rounded(policy, config.run.seed) is not None
    return rounded and needs_stand_ins(optimizer.component.load_target(), optimizer.config)


def _profile(accelerator: str) -> DeviceProfile:
    """The row of the device type that the run is for. Of ``auto`` on a machine without an accelerator it is not known,
    so that it promises nothing that a layout could do without."""
    found = available_type() if accelerator == "auto" else accelerator
    if accelerator == "auto" and PROFILES[found].host:
        return replace(profile_of(torch.device("meta")), symmetric_memory=True)
    return PROFILES[found]
