"""Kind ``optimizer``: builds a ``torch.optim.Optimizer`` over parameter groups.

Example::

    def build_sgd(groups: list[ParameterGroup], config: SGDConfig) -> torch.optim.Optimizer:
        return torch.optim.SGD(as_torch(groups), lr=config.lr, momentum=config.momentum)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypedDict

if TYPE_CHECKING:
    import torch

__all__ = ["OptimizerFactory", "ParameterGroup"]


class ParameterGroup(TypedDict):
    """A parameter group as ``torch.optim`` takes it. ``lr`` and ``weight_decay`` are set by the core from
    ``model.optim``, the plan's norm and no-decay patterns and ``do_layer_norm_weight_decay``."""

    params: list[torch.nn.Parameter]
    names: list[str]
    """Global names, one a parameter; optimizer state is saved under them."""
    lr: float
    weight_decay: float


class OptimizerFactory(Protocol):
    """The target of the kind: a callable. ``config`` is the dataclass of ``model.optim``.

    Its dataclass should have ``lr`` and ``weight_decay``. The optimizer keeps its state per parameter in
    ``optimizer.state[p]``: tensors of the parameter's shape, or scalars; nothing else can be resharded.
    """

    def __call__(self, groups: list[ParameterGroup], config: Any) -> torch.optim.Optimizer:
        """Build the optimizer over ``groups``."""
        ...
