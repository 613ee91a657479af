"""What an engine offers to loops that call the model and ``backward`` themselves (:mod:`nxdt_core.primitives`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.optimizer import ParameterGroup
from nxdt_core.protocols.parallel.engine import ParallelEngine
from nxdt_core.protocols.parallel.model import ParallelModel, ParallelOptimizer
from nxdt_core.protocols.precision import PrecisionPolicy

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["CalledEngine", "CalledMesh", "CalledModel"]


class CalledModel(ParallelModel, Protocol):
    """A model in its layout whose caller runs forward and backward."""

    def call(self, batch: Batch) -> Any:
        """Return what the module returns for ``batch.input_ids`` and ``batch.arguments()``, with gradients.

        Gradients are sums over data parallel ranks once the optimizer has finished them. There is no pipeline.
        """
        ...

    def label_losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of each label; ``logits`` are this tensor parallel rank's columns. Collective."""
        ...


class CalledMesh(Protocol):
    """This rank's place along ``tp``, ``dp``, ``pp``, ``fsdp`` and ``dp_replicate``, and its process groups."""

    def size(self, dim: Any) -> int:
        """Ranks along ``dim``."""
        ...

    def rank(self, dim: Any) -> int:
        """This rank's coordinate along ``dim``."""
        ...

    def mesh(self, *dims: Any) -> DeviceMesh:
        """Return the device mesh along ``dims``; there is none in one process without a process group."""
        ...


class CalledEngine(ParallelEngine, Protocol):
    """An engine with such models, and with optimizers over groups of the caller's own."""

    mesh: CalledMesh

    def initialize_model(
        self,
        builder: ModelBuilder,
        *,
        precision: PrecisionPolicy,
        seed: int,
        adapters: Any = (),
        materialise: bool = True,
    ) -> CalledModel:
        """Return a model in its layout."""
        ...

    def optimizer_over(
        self,
        model: Any,
        make: Callable[[list[ParameterGroup]], torch.optim.Optimizer],
        groups: Sequence[ParameterGroup],
        *,
        lr: float = 0.0,
    ) -> ParallelOptimizer:
        """Return the optimizer that ``make`` builds over this rank's shards of the parameters of ``groups``."""
        ...
