"""The model and optimizers that layers and losses belong to: NxD Core's functions take neither."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from nxdt_core.protocols.parallel.called import CalledModel

__all__ = ["Finishes", "current_model", "optimizers_of", "register_optimizer", "set_current_model"]


class Finishes(Protocol):
    """An optimizer that finishes the gradients of its parameters."""

    trained: list[torch.nn.Parameter]

    def finish(self, max_norm: float | None) -> torch.Tensor:
        """Finish the gradients' sums, clip to ``max_norm``, and return the norm before. Collective."""
        ...


_MODELS: list[CalledModel] = []
_OPTIMIZERS: dict[int, Finishes] = {}
"""By the id of each parameter that they train."""


def current_model() -> CalledModel | None:
    """Return the model that was initialised last; None before that."""
    return _MODELS[-1] if _MODELS else None


def set_current_model(model: CalledModel | None) -> None:
    """Remember ``model`` for :func:`current_model`, and forget the optimizers of the one before."""
    _MODELS[:] = [] if model is None else [model]
    _OPTIMIZERS.clear()


def register_optimizer(optimizer: Finishes) -> None:
    """Remember which optimizer trains a parameter."""
    _OPTIMIZERS.update((id(parameter), optimizer) for parameter in optimizer.trained)


def optimizers_of(parameters: Iterable[torch.Tensor]) -> list[Finishes | None]:
    """Return the optimizers that train the parameters, each once; None for what none trains."""
    found = {id(owner): owner for owner in (_OPTIMIZERS.get(id(parameter)) for parameter in parameters)}
    return [*found.values()]
