"""State of an optimizer: the form in which checkpoints have it, and how a step is undone on the device.

The form is that of :class:`nxdt_core.protocols.optimizer.PackedState`. A step is undone where only the device knows
whether its loss and gradient were finite, so that the host never waits for that.

:class:`EagerOptimizer` leaves out the code of ``torch.optim`` that lets ``torch.compile`` trace an optimizer. That code
wraps ``step`` and ``add_param_group``, and imports ``torch._dynamo`` when they are called: one CPU-second at the start
of a run. No optimizer is compiled here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import unwrap
from typing import Any

import torch
from torch import nn

from nxdt_core.distributed.devices import HOST
from nxdt_core.protocols.optimizer import OptimizerFactory, PackedState, ParameterGroup, ParameterShard


class EagerOptimizer(torch.optim.Optimizer):
    """A base for optimizers, alone or before a class of ``torch.optim``, whose methods it calls without wrappers."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        unwrap(super().add_param_group.__func__)(self, param_group)  # type: ignore[attr-defined]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters from their gradients."""
        return unwrap(super().step.__func__)(self, closure)  # type: ignore[attr-defined]


@cache
def eager(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Return the subclass of ``kind``, a class of ``torch.optim``, with the same name and without the wrappers."""
    return type(kind.__name__, (EagerOptimizer, kind), {})


def unpacked_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Mapping[str, Any]:
    """Return the state of ``parameter`` as checkpoints have it; empty before the first step."""
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    return optimizer.unpacked(parameter) if state and isinstance(optimizer, PackedState) else state


def packed_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state``, as a checkpoint has it, in the form that ``optimizer`` keeps it in."""
    return optimizer.packed(parameter, state) if isinstance(optimizer, PackedState) else dict(state)


def stepped_once(
    factory: OptimizerFactory,
    config: object,
    parameters: Sequence[torch.nn.Parameter],
    shards: Sequence[ParameterShard] | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer over ``parameters`` after a step with gradients of zeros, to see what state it keeps.

    Args:
        factory: builds the optimizer over parameter groups.
        config: section of the optimizer; its ``lr`` is used.
        parameters: in one group; they get gradients of zeros.
        shards: one per parameter; None: each is whole.
    """
    names = [f"probe.{number}" for number in range(len(parameters))]
    group = ParameterGroup(params=[*parameters], names=names, lr=getattr(config, "lr", 0.0), weight_decay=0.0)
    if shards is not None:
        group["shards"] = [*shards]
    optimizer = factory([group], config)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


class DeviceRejection:
    """Restores weights and optimizer state after a step whose rejection only the device knows.

    The step runs in any case, on gradients of zeros where it is rejected. ``torch.where`` then takes the old values or
    the new ones. This needs a second copy of weights and state during the step; devices that compile whole steps
    need no additional memory for it.

    Counters that the optimizer keeps on the host, such as the step of Adam, do not depend on the rejection. They also
    count rejected steps until :meth:`settle` subtracts them.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        trained: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """``weights``: of this rank by name; ``trained``: what the optimizer sees in their place."""
        self._weights = weights
        self._trained = trained
        self._optimizer = optimizer
        self._unsettled: torch.Tensor | None = None
        self._growth: dict[tuple[str, str], Any] = {}

    @contextmanager
    def undoing(self, rejected: torch.Tensor) -> Iterator[None]:
        """Keep a step from changing anything where the boolean device scalar ``rejected`` is true."""
        for weight in self._weights.values():
            if weight.grad is not None:
                weight.grad = torch.where(rejected, torch.zeros_like(weight.grad), weight.grad)
        weights = {name: weight.detach().clone() for name, weight in self._weights.items()}
        state = {key: value.clone() for key, value in self._state() if _on_device(value)}
        counters = {key: _number(value) for key, value in self._state() if _counts(value)}
        yield
        for name, old in weights.items():
            new = self._weights[name].detach()
            new.copy_(torch.where(rejected, old, new))
        for key, value in self._state():
            if key in state:
                value.copy_(torch.where(rejected, state[key], value))
            elif _counts(value):
                self._growth[key] = _number(value) - counters.get(key, 0)
        counted = rejected.to(torch.int64)
        self._unsettled = counted if self._unsettled is None else self._unsettled + counted

    def settle(self) -> None:
        """Subtract rejected steps from the counters on the host; waits for the device."""
        count = 0 if self._unsettled is None else int(self._unsettled)
        self._unsettled = None
        if not count:
            return
        for (name, leaf), growth in self._growth.items():
            state = self._optimizer.state[self._trained[name]]
            state[leaf] = state[leaf] - growth * count

    def forget(self) -> None:
        """Forget rejected steps: the state was loaded."""
        self._unsettled = None

    def _state(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for name, trained in self._trained.items():
            for leaf, value in self._optimizer.state.get(trained, {}).items():
                yield (name, leaf), value


def _on_device(value: object) -> bool:
    """Return whether ``value`` can be undone on the device; scalars on the host are counters."""
    return isinstance(value, torch.Tensor) and (value.device != HOST or value.dim() > 0)


def _counts(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and not _on_device(value))


def _number(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
