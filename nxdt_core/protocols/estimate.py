"""Estimates of a run that an engine makes without its devices; ``nxdt plan`` prints them. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.objective import Objective
from nxdt_core.protocols.precision import PrecisionPolicy

__all__ = ["Estimate", "Memory", "RankEstimate", "RunParts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """The components of a run that an estimate depends on, built without devices."""

    builder: ModelBuilder
    adapters: Sequence[Adapter]
    objective: Objective
    precision: PrecisionPolicy
    extra_state_bytes: float = 0.0
    """Bytes per trained element that the run holds besides the optimizer's state, such as averaged weights."""
    teacher: ModelBuilder | None = None
    """Builder of a second model, which runs forward only, where the objective has a
    :attr:`~nxdt_core.protocols.objective.Objective.teacher`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Estimated memory of one rank in bytes, by what it is for."""

    weights: int = 0
    """Shards and what is gathered of them."""
    gradients: int = 0
    optimizer: int = 0
    """State of the optimizer, and fp32 masters where the weights have another dtype."""
    activations: int = 0
    """Tensors kept for backward, of all micro-batches in flight."""
    logits: int = 0
    """The model's output, its gradient, and what the loss needs."""
    workspace: int = 0
    """Temporary memory of backward in a layer, recomputed activations included."""
    communication: int = 0
    """Buffers of gathered weights and of gradients that are being reduced."""
    cache: int = 0
    """Keys and values of the answers that the model writes before a step."""

    @property
    def total(self) -> int:
        """Return the sum of all parts in bytes."""
        return sum(getattr(self, part.name) for part in fields(self))


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
    """Estimated needs of one run: memory of each rank, traffic, idle time."""

    parameters: int
    """Parameters of the whole model; tied ones count once."""
    trained: int
    micro_batches: int
    """Micro-batches of one step, on each rank."""
    tokens_per_step: int
    bubble: float
    """Share of a step in which pipeline ranks wait for one another, because of the schedule and of unequal stages."""
    checkpoint_bytes: int
    """Weights and optimizer state."""
    flops_per_token: float
    """Forward and backward, recomputation not counted."""
    layout: tuple[str, ...]
    """Parallel layout of the run, for people: ``("8 ranks", "TP 2", "ZeRO-1")``."""
    ranks: tuple[RankEstimate, ...]
    """Estimates by place in the pipeline."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty without a pipeline."""
    pipeline_cuts: tuple[str, ...] = ()
    """Last layer of each stage but the final one."""
    longest_rank: float = 1.0
    """Computation of the pipeline rank that has the most, over the mean of all."""
    compute_dtype: str = "float32"
    """Dtype of matrix products."""
    recomputed: float = 0.0
    """Operations that backward repeats, and those of a teacher, as a share of ``flops_per_token``."""
    hidden_behind: Mapping[str, float] = field(default_factory=dict)
    """By mesh dimension, the share of a step's computation during which its traffic can be under way; 0 where ranks
    wait for it."""
    never_hidden: Mapping[str, float] = field(default_factory=dict)
    """Share of the traffic of each mesh dimension that ranks wait for in any case."""

    @property
    def fullest(self) -> RankEstimate:
        """Return the rank that needs the most memory."""
        return max(self.ranks, key=lambda rank: rank.memory.total)

    @property
    def flops_per_step(self) -> float:
        """Return the floating-point operations per step of all ranks together."""
        return self.flops_per_token * self.tokens_per_step
