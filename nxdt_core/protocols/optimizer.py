"""Kind ``optimizer``: builds a ``torch.optim.Optimizer`` over parameter groups.

Example::

    def build_sgd(groups: list[ParameterGroup], config: SGDConfig) -> torch.optim.Optimizer:
        return torch.optim.SGD(as_torch(groups), momentum=config.momentum)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypedDict

from nxdt_core.protocols.tensor_shards import TensorSlice

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["OptimizerFactory", "PackedState", "ParameterGroup", "ParameterShard", "as_torch", "shards_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShard:
    """Positions of the elements that this rank trains in the whole parameter, and who has the others.

    For optimizers that look at more than one element at a time. What all ranks of ``groups`` compute together they
    must compute identically: the ranks beyond hold the same elements as one of them.
    """

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    region: TensorSlice
    """This rank's elements in it; there may be none."""
    groups: tuple[dist.ProcessGroup, ...] = ()
    """Process groups along which the parameter is sharded, the outermost first; none where this rank has all of it."""
    matrix: bool = False
    """True for a matrix, or a stack of them, of a hidden layer: no embedding, output head, norm or bias."""

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of ``region`` in a tensor of the local parameter's shape, which zeros may fill up; a
        view."""
        return tensor[tuple(slice(0, size) for size in self.region.shape)]


class ParameterGroup(TypedDict):
    """A parameter group as ``torch.optim`` takes it. ``lr`` and ``weight_decay`` are set by the core from
    ``model.optim`` with its ``param_groups``, the plan's norm and no-decay patterns and
    ``do_layer_norm_weight_decay``."""

    params: list[torch.nn.Parameter]
    """This rank's shards as plain tensors."""
    names: list[str]
    """Global names, one per parameter; optimizer state is saved under them."""
    lr: float
    weight_decay: float
    shards: NotRequired[list[ParameterShard]]
    """One per parameter; without them every parameter is whole."""


def as_torch(groups: Sequence[ParameterGroup]) -> list[dict[str, Any]]:
    """Return the groups with what torch's optimizers know: names, learning rate and weight decay."""
    return [{key: value for key, value in group.items() if key != "shards"} for group in groups]


def shards_of(groups: Sequence[ParameterGroup]) -> Mapping[torch.Tensor, ParameterShard]:
    """Return the shard of each parameter; one that nothing is said of is whole, and a matrix where it has rows and
    columns."""
    shards: dict[torch.Tensor, ParameterShard] = {}
    for group in groups:
        shapes = [tuple(parameter.shape) for parameter in group["params"]]
        whole = [
            ParameterShard(shape=shape, region=TensorSlice.whole(shape), matrix=len(shape) >= 2) for shape in shapes
        ]
        shards.update(zip(group["params"], group.get("shards", whole), strict=True))
    return shards


class OptimizerFactory(Protocol):
    """The target of the kind: a callable. ``config`` is the section ``model.optim``.

    Its section should have ``lr`` and ``weight_decay``. The optimizer keeps its state per parameter in
    ``optimizer.state[p]``: tensors of the parameter's shape are resharded with it; scalars, and tensors of another
    number of dimensions, must be equal on all ranks that share the parameter. State of another form needs
    :class:`PackedState`. An update that is not made element by
    element needs ``shards``, since ``params`` are pieces.
    """

    def __call__(self, groups: list[ParameterGroup], config: Any) -> torch.optim.Optimizer:
        """Build the optimizer over ``groups``."""


class PackedState(ABC):
    """Second base class of an optimizer that keeps its state in another form than checkpoints have it.

    State that was unpacked and packed must be bitwise the same, so that a resumed run is exact.
    """

    @abstractmethod
    def unpacked(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """Return the state of ``parameter`` in the form that :class:`OptimizerFactory` asks for; tensors of the
        parameter's shape may be on the host."""

    @abstractmethod
    def packed(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``state``, as :meth:`unpacked` returned it in this layout or in another, in the optimizer's form."""
