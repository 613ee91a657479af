"""Kind ``engine``: a runtime that lays a plain model out over processes and runs steps on it. No torch at import.

The built-in ``torch`` engine serves every device type that torch knows; others hand the same model and plan to
another library. An engine applies the plan in the order of :class:`nxdt_core.protocols.plan.ParallelPlan`.

A record may name a function that finds layouts which the engine cannot run (``EngineComponent.rules``). ``nxdt config
check``, ``nxdt plan`` and ``nxdt train`` call it::

    def find_impossible_layouts(settings):
        heads, tp = "model.num_attention_heads", "distributed_strategy.tensor_model_parallel_size"
        numbers = settings.numbers(heads, tp)
        if numbers is not None and numbers[0] % numbers[1]:
            yield ImpossibleCombination(
                **settings.place(heads, tp),
                reason=f"{numbers[0]} is not divisible by tensor_model_parallel_size {numbers[1]}",
                advice=f"Choose a tensor parallel size that divides {numbers[0]}.",
            )
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from nxdt_core.errors.configuration import ConfigProblem
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.optimizer import OptimizerFactory
from nxdt_core.protocols.parallel_model import ParallelModel, ParallelOptimizer
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.protocols.ranks import RankAgreement

if TYPE_CHECKING:
    import torch

__all__ = [
    "ChecksProducts",
    "CompileAhead",
    "CompilesAhead",
    "EngineRules",
    "GraphOrigins",
    "ParallelEngine",
    "RankInfo",
    "Settings",
]


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
        frozen: bool = False,
    ) -> ParallelModel:
        """Build on meta, apply adapters and plan, materialise. ``materialise=False`` allocates without drawing
        weights, for a load that follows. ``frozen``: another model than the run's, forward only, such as a teacher;
        asked of engines with the capability ``frozen_model`` alone."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOrigins:
    """How many graphs of a process were compiled, and how many were in the cache."""

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
        return GraphOrigins(
            new=self.new - other.new, found=self.found - other.found, not_kept=self.not_kept - other.not_kept
        )

    def __str__(self) -> str:
        text = f"{self.new} new, {self.found} from the cache"
        return f"{text}, {self.not_kept} that the cache cannot keep" if self.not_kept else text


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileAhead:
    """What an engine says of compiling ahead of one run."""

    cache: str
    """Where compiled graphs are kept, for people."""
    origins: Callable[[], GraphOrigins] | None = None
    """Counts the graphs of the calling process so far; None where the steps of a trial compile nothing themselves."""
    tool: tuple[str, ...] = ()
    """Words in front of the command that runs a trial. The tool collects the graphs of the trial and compiles them when
    it ends; none where the steps compile."""
    result: Callable[[], str] | None = None
    """Says what the tool has added to the cache since this was made."""


@runtime_checkable
class CompilesAhead(Protocol):
    """Optional member of an engine's class: a cache of compiled graphs that a trial fills."""

    @staticmethod
    def compile_ahead(config: Any) -> CompileAhead:
        """Say how a trial of the run fills the cache that the run reads. The trial's own processes ask, too.

        Args:
            config: the whole resolved configuration, checked.

        Raises:
            CompileIsOff: the run compiles nothing.
            NxdtError: the cache cannot be written, or a tool is missing.
        """
        ...


@runtime_checkable
class ChecksProducts(Protocol):
    """Optional member of an engine's class: whether machines of a product can run a layout."""

    @staticmethod
    def check_product(config: Any, product: str) -> None:
        """Refuse what the machines of ``product`` cannot run, such as ranks that their links do not connect.

        Args:
            config: the whole resolved configuration, checked.
            product: name in a device profile, such as ``trn1``.

        Raises:
            NxdtError: with the reason.
        """
        ...


class Settings(Protocol):
    """The values of a configuration as rules see them, and where each was written."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Typed values by key path; a wrong one is absent, and rules that need it yield nothing."""
        ...

    def numbers(self, *keys: str) -> tuple[int, ...] | None:
        """Return the values of ``keys``, or None where one of them is absent, ``null`` or not a number."""
        ...

    def place(self, *keys: str) -> Any:
        """Return the place of a problem between ``keys``: keywords of every :class:`ConfigProblem`."""
        ...


EngineRules = Callable[[Settings], Iterable[ConfigProblem]]
"""The function that a record names: yields a problem for each layout that the engine cannot run, mostly
:class:`nxdt_core.errors.configuration.ImpossibleCombination`."""
