"""Kind ``engine``: a runtime that lays a plain model out over processes and runs steps on it. No torch at import.

The built-in ``torch`` engine serves every device type that torch knows; others hand the same model and plan to
another library. An engine applies the plan in the order of :class:`nxdt_core.protocols.plan.ParallelPlan`.

A record may name a function that finds what the engine cannot run (``EngineComponent.rules``). ``nxdt config
check``, ``nxdt plan`` and ``nxdt train`` call it::

    def find_impossible_layouts(settings):
        heads, tp = "model.num_attention_heads", "distributed_strategy.tensor_model_parallel_size"
        numbers = settings.numbers(heads, tp)
        if numbers is not None and numbers[0] % numbers[1]:
            yield settings.impossible(
                heads,
                tp,
                reason=f"{numbers[0]} is not divisible by tensor_model_parallel_size {numbers[1]}",
                advice=f"Choose a tensor parallel size that divides {numbers[0]}.",
            )
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from nxdt_core.errors.configuration import ConfigProblem, Misfit, Place
from nxdt_core.errors.launch import EngineCannotCompileAhead, EngineWithoutEstimate
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.estimate import Estimate, RunParts
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.optimizer import OptimizerFactory
from nxdt_core.protocols.parallel_model import ParallelModel, ParallelOptimizer
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.protocols.ranks import RankAgreement

if TYPE_CHECKING:
    import torch

__all__ = ["CompileAhead", "EngineRules", "GraphOrigins", "ParallelEngine", "RankInfo", "Settings"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOrigins:
    """Numbers of graphs that a process compiled and that it loaded from the cache."""

    new: int = 0
    """Compiled, and kept in the cache."""
    found: int = 0
    """Loaded from the cache."""
    not_kept: int = 0
    """Compiled, and of a kind that the cache cannot keep."""

    def __add__(self, other: GraphOrigins) -> GraphOrigins:
        return GraphOrigins(
            new=self.new + other.new, found=self.found + other.found, not_kept=self.not_kept + other.not_kept
        )

    def __sub__(self, other: GraphOrigins) -> GraphOrigins:
        return self + GraphOrigins(new=-other.new, found=-other.found, not_kept=-other.not_kept)

    def __str__(self) -> str:
        text = f"{self.new} new, {self.found} from the cache"
        return f"{text}, {self.not_kept} that the cache cannot keep" if self.not_kept else text


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileAhead:
    """Settings with which an engine compiles the graphs of one run ahead."""

    cache: str
    """Place of the compiled graphs, for messages."""
    origins: Callable[[], GraphOrigins] | None = None
    """Counts the graphs of the calling process so far; None where the steps of a trial compile nothing themselves."""
    tool: tuple[str, ...] = ()
    """Words in front of the command that runs a trial. The tool collects the graphs of the trial and compiles them when
    it ends; none where the steps compile."""
    result: Callable[[], str] | None = None
    """Says what the tool has added to the cache since this was made."""


class ParallelEngine(ABC):
    """The target of the kind, called as ``Target(config)`` with the whole resolved configuration."""

    device: torch.device
    rank_info: RankInfo
    """This process's place; known before :meth:`start`."""
    ranks: RankAgreement
    """The run's processes; they can agree after :meth:`start`."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def start(self) -> None:
        """Join the process group and build the mesh; called once, before anything else."""

    @abstractmethod
    def initialize_model(
        self,
        builder: ModelBuilder,
        *,
        precision: PrecisionPolicy,
        seed: int,
        adapters: Sequence[Adapter] = (),
        materialise: bool = True,
        frozen: bool = False,
    ) -> ParallelModel:
        """Build on meta, apply adapters and plan, materialise. ``materialise=False`` allocates without drawing
        weights, for a load that follows. ``frozen``: another model than the run's, forward only, such as a teacher;
        asked of engines with the capability ``frozen_model`` alone."""

    @abstractmethod
    def initialize_optimizer(
        self, model: Any, factory: OptimizerFactory, config: Any, *, decay_norms: bool
    ) -> ParallelOptimizer:
        """Parameter groups by the plan's decay rules, then the optimizer over them.

        Args:
            model: what :meth:`initialize_model` returned.
            factory: makes the optimizer.
            config: the section ``model.optim``.
            decay_norms: whether norms take weight decay.
        """

    def shutdown(self) -> None:
        """Leave the process group; may be called twice."""

    # What it says of a run before it is built.

    @classmethod
    def estimate(cls, config: Any, parts: RunParts) -> Estimate:
        """Estimate the run of ``config`` over ``trainer.devices`` x ``trainer.num_nodes`` processes.

        Args:
            config: the whole resolved configuration, checked.
            parts: built from it.

        Raises:
            EngineWithoutEstimate: the engine gives none; the default.
            NxdtError: the run would not start.
        """
        component = config.selected("engine").component
        raise EngineWithoutEstimate(engine=component.record.name, dist=component.dist)

    @classmethod
    def local_elements(cls, builder: ModelBuilder, sizes: MeshSizes) -> Mapping[str, int]:
        """Lay out the builder's model on the meta device as rank 0 of ``sizes``, in a process without a process group.

        Returns:
            By global parameter name, the number of elements that rank 0 holds.

        Raises:
            EngineWithoutEstimate: the engine does not know; the default.
            NxdtError: the model's plan does not allow the layout.
        """
        raise EngineWithoutEstimate(engine=cls.__name__, dist=cls.__module__.partition(".")[0])

    @classmethod
    def compile_ahead(cls, config: Any) -> CompileAhead:
        """Say how a trial of the run fills the cache that the run reads. The trial's own processes ask, too.

        Args:
            config: the whole resolved configuration, checked.

        Raises:
            EngineCannotCompileAhead: the engine has no cache of compiled graphs; the default.
            CompileIsOff: the run compiles nothing.
            NxdtError: the cache cannot be written, or a tool is missing.
        """
        component = config.selected("engine").component
        raise EngineCannotCompileAhead(engine=component.record.name, dist=component.dist)

    @classmethod
    def check_product(cls, config: Any, product: str) -> None:
        """Refuse what the machines of ``product`` cannot run, such as ranks that their links do not connect.

        Args:
            config: the whole resolved configuration, checked.
            product: name in a device profile, such as ``trn1``.

        Raises:
            NxdtError: with the reason.
        """


class Settings(Protocol):
    """The values of a configuration as rules see them, and where each was written."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Typed values by key path; a wrong one is absent, and rules that need it yield nothing."""

    @property
    def policy(self) -> PrecisionPolicy | None:
        """Dtypes of the run; None where the section ``precision`` is wrong."""

    def numbers(self, *keys: str) -> tuple[int, ...] | None:
        """Return the values of ``keys``, or None where one of them is absent, ``null`` or not a number."""

    def mesh_sizes(self) -> MeshSizes | None:
        """Return the size of every dimension; None where they do not fit the processes or one is wrong."""

    def micro_batches(self) -> int | None:
        """Return the micro-batches of one step on each data parallel rank; None where the batch does not divide."""

    def place(self, *keys: str) -> Place:
        """Return the place of a problem between ``keys``."""

    def impossible(self, *keys: str, reason: str, advice: str, cause: Misfit | None = None) -> ConfigProblem:
        """Return the problem of values of ``keys`` that exclude each other; ``cause`` is given where one of two sizes
        does not divide the other."""


EngineRules = Callable[[Settings], Iterable[ConfigProblem]]
"""The function that a record names: yields a problem for each setting that the engine cannot run, mostly by
:meth:`Settings.impossible`."""
