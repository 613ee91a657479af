"""The workload of an estimate: a model, its training and its layout, read from a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.device_settings import register_profile_of
from nxdt_core.distributed.devices import PROFILES, DeviceProfile, available_type, profile_of
from nxdt_core.engine.estimate.weights import StateOf, needs_stand_ins, optimizer_state
from nxdt_core.engine.layout import LayoutOptions
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.optim.rounding import updates_rounded
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.estimate import RunParts
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.objective import Objective
from nxdt_core.protocols.precision import PrecisionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A run, as far as its sizes depend on it."""

    builder: ModelBuilder
    teacher: ModelBuilder | None = None
    """Builder of a second model, which runs forward only."""
    adapters: Sequence[Adapter] = ()
    objective: Objective
    precision: PrecisionPolicy
    state: StateOf
    """Measures the optimizer state of a parameter."""
    stand_ins: bool = False
    """The optimizer works on float32 stand-ins of weights that are rounded."""
    sizes: MeshSizes
    options: LayoutOptions
    micro_batch_size: int
    global_batch_size: int
    seq_length: int
    saves_bfloat16: bool = False
    """Checkpoints also store wider weights in bfloat16."""
    records: bool = False
    """The device records passes of generation, whose cache is then kept during a step."""
    packed: bool = False
    """Samples hold several documents that do not see each other: attention then receives their ids."""

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches per step and rank."""
        return self.global_batch_size // (self.micro_batch_size * self.sizes.dp)

    @property
    def rows(self) -> int:
        """Return the number of sequences per micro-batch."""
        return self.micro_batch_size * self._rows_per_sample

    @property
    def _rows_per_sample(self) -> int:
        traits = self.objective.traits
        return traits.loss_rows or traits.rows_per_sample

    def batch(self) -> Batch:
        """Return one micro-batch as a rank sees it, on the meta device."""

        def tokens() -> torch.Tensor:
            shape = self.rows, self.seq_length // self.sizes.cp
            return torch.empty(shape, dtype=torch.int64, device="meta")

        traits = self.objective.traits
        placed = self.sizes.cp > 1 or self.sizes.pp > 1 or self.packed
        return Batch(
            input_ids=tokens(),
            labels=tokens(),
            position_ids=tokens() if placed else None,
            document_ids=tokens() if self.packed else None,
            reference_log_probs=tokens().float() if traits.reference else None,
            values={name: tokens().float() for name in traits.values},
            rows_per_sample=self._rows_per_sample,
        )

    def hidden(self, size: int) -> torch.Tensor:
        """Hidden states of a micro-batch within pipeline stages, of width ``size``."""
        sequence = self.seq_length // self.sizes.cp
        if self.options.sequence_parallel:
            sequence //= self.sizes.tp
        dtype = getattr(torch, self.precision.parameters)
        return torch.empty(self.rows, sequence, size, dtype=dtype, device="meta")

    def hidden_bytes(self, size: int) -> int:
        """Return the bytes of :meth:`hidden` on their way to another stage; 0 where nothing travels."""
        return self.hidden(size).to(self.sent).nbytes if self.sizes.pp > 1 else 0

    @property
    def autocast(self) -> torch.dtype | None:
        """Return the dtype of matrix products under autocast; None without it."""
        return None if self.precision.autocast is None else getattr(torch, self.precision.autocast)

    @property
    def sent(self) -> torch.dtype:
        """Return the dtype in which hidden states travel between pipeline stages."""
        dtype: torch.dtype = self.autocast or getattr(torch, self.precision.parameters)
        return dtype


def workload_of(config: ResolvedConfig, parts: RunParts) -> Workload:
    """Return the sizes of the run of ``config``.

    Raises:
        NxdtError: the run would not start.
    """
    register_profile_of(config)
    run = config.run
    profile = _profile(run.trainer.accelerator)
    sizes = run.distributed_strategy.mesh_sizes(run.trainer.devices * run.trainer.num_nodes)
    return Workload(
        builder=parts.builder,
        teacher=parts.teacher,
        adapters=parts.adapters,
        objective=parts.objective,
        precision=parts.precision,
        state=_state(config, parts),
        stand_ins=_stand_ins(config, parts.precision),
        sizes=sizes,
        options=LayoutOptions.of(run, profile, ParallelMesh(sizes, None)),
        micro_batch_size=run.data.micro_batch_size,
        global_batch_size=run.data.global_batch_size,
        seq_length=run.data.seq_length,
        saves_bfloat16=run.checkpoint.save_bf16,
        records=profile.records,
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
    """Return whether the optimizer rounds weights and has no kernel for that."""
    optimizer = config.selected("optimizer")
    rounded = updates_rounded(policy, config.run.seed) is not None
    return rounded and needs_stand_ins(optimizer.component.load_target(), optimizer.config)


def _profile(accelerator: str) -> DeviceProfile:
    """The row of the device type that the run is for. Of ``auto`` on a machine without an accelerator it is not known,
    so that it promises nothing that a layout could do without, and has what takes memory."""
    device_type = available_type() if accelerator == "auto" else accelerator
    if accelerator == "auto" and PROFILES[device_type].host:
        return replace(profile_of(torch.device("meta")), symmetric_memory=True, records=True)
    return PROFILES[device_type]
