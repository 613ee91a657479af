"""Kind ``engine``: a runtime that lays a plain model out over processes and runs steps on it.

The built-in ``torch`` engine serves every device type that torch knows; others hand the same model and plan to
another library. An engine applies the plan in the order of :class:`nxdt_core.protocols.plan.ParallelPlan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.optimizer import OptimizerFactory
from nxdt_core.protocols.parallel.model import ParallelModel, ParallelOptimizer
from nxdt_core.protocols.parallel.ranks import RankAgreement
from nxdt_core.protocols.precision import PrecisionPolicy

if TYPE_CHECKING:
    import torch

__all__ = ["ParallelEngine", "RankInfo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """This process's place. ``dp_*`` counts the ranks that read different samples."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    dp_rank: int = 0
    dp_size: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Size by dimension name (``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``, ``ep``)."""


@runtime_checkable
class ParallelEngine(Protocol):
    """The target of the kind, called as ``Target(config)`` with the whole resolved configuration."""

    device: torch.device

    @property
    def rank_info(self) -> RankInfo:
        """This process's place; known before :meth:`start`."""
        ...

    @property
    def ranks(self) -> RankAgreement:
        """The run's processes; they can agree after :meth:`start`."""
        ...

    def __init__(self, config: Any) -> None: ...

    def start(self) -> None:
        """Join the process group and build the mesh; called once, before anything else."""
        ...

    def initialize_model(
        self,
        builder: ModelBuilder,
        *,
        precision: PrecisionPolicy,
        seed: int,
        adapters: Sequence[Adapter] = (),
        materialise: bool = True,
    ) -> ParallelModel:
        """Build on meta, apply adapters and plan, materialise. ``materialise=False`` allocates without drawing
        weights, for a load that follows."""
        ...

    def initialize_optimizer(
        self, model: ParallelModel, factory: OptimizerFactory, config: Any, *, decay_norms: bool
    ) -> ParallelOptimizer:
        """Parameter groups by the plan's decay rules, then the optimizer over them."""
        ...

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value on every rank (JSON-able)."""
        ...

    def shutdown(self) -> None:
        """Leave the process group; may be called twice."""
        ...
