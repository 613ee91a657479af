"""Tensors that the optimizer updates: this data parallel rank's part of parameters, or of their float32 masters.

ZeRO-1: a rank updates its part of each parameter along the first dimension and keeps the optimizer's state for that
alone; afterwards the ranks gather the parts. A parameter that does not divide is updated by all of them. (The
library's own ZeRO-1 accepts tensors on a device of torch-xla only, and its state has no place in the whole model.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from neuronx_distributed.parallel_layers import comm
from torch import nn

from nxdt_core.models.random.positions import noise, rounded, rows_of
from nxdt_core.protocols.optimizer import ParameterShard
from nxdt_core.protocols.piece import Box, Piece
from nxdt_plugin_nxd.layout.stages import LocalParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSharding:
    """Ranks that hold the same elements of a parameter and share the optimizer's state of it."""

    part: int = 0
    """Index of this rank's part."""
    parts: int = 1
    """Number of parts; 1 shares nothing."""
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTensor:
    """A tensor that the optimizer updates."""

    held: LocalParameter
    tensor: nn.Parameter
    """The parameter itself where nothing is divided and no master is kept."""
    part: int
    parts: int
    group: dist.ProcessGroup | None
    """Ranks that have the other parts."""

    def box(self) -> Box:
        """Return the place of its elements in the whole parameter."""
        outer, size = self.held.box(), self.tensor.shape[0] if self.tensor.ndim else 0
        if self.parts == 1:
            return outer
        offsets = (outer.offsets[0] + self.part * size, *outer.offsets[1:])
        return Box(offsets, (size, *outer.shape[1:]))

    def piece(self, value: torch.Tensor) -> torch.Tensor | Piece:
        """Return a tensor of this one's shape as a checkpoint takes it."""
        return self.held.piece(value) if self.parts == 1 else Piece(value, self.held.shape, self.box())

    def placed(self, tensor_group: dist.ProcessGroup | None, expert_group: dist.ProcessGroup | None) -> ParameterShard:
        """Return the optimizer's record of where this parameter is."""
        over = [tensor_group] if self.held.shard is not None else []
        over += [expert_group] if self.held.distributed else []
        over += [self.group] if self.parts > 1 else []
        groups = tuple(group for group in over if group is not None)
        return ParameterShard(shape=self.held.shape, box=self.box(), groups=groups, matrix=len(self.held.shape) >= 2)

    @property
    def separate(self) -> bool:
        """True if the part is a separate tensor."""
        return self.tensor is not self.held.parameter

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        """Assign this part of the parameter's gradient to the tensor."""
        if self.separate:
            self.tensor.grad = None if gradient is None else self._own(gradient).to(self.tensor.dtype)
        else:
            self.tensor.grad = gradient

    @torch.no_grad()
    def take(self) -> None:
        """Take over the parameter's values, after a load of those."""
        if self.separate:
            self.tensor.copy_(self._own(self.held.parameter))

    @torch.no_grad()
    def give(self, groups: object, key: torch.Tensor | None = None) -> None:
        """Hand the values of all parts to the parameter, after an update. Collective along ``groups``.

        With a ``key`` (:func:`nxdt_core.models.random.positions.rounding_key`) they are rounded stochastically.
        """
        if not self.separate:
            return
        value = self.tensor.detach() if key is None else self._rounded(key)
        value = value.to(self.held.parameter.dtype)
        if self.parts > 1:
            value = comm.all_gather(value, dim=0, groups=groups, pin_layout=False)
        self.held.parameter.copy_(value)

    def _rounded(self, key: torch.Tensor) -> torch.Tensor:
        """Round by the number of each element in the whole parameter, as the torch engine does."""
        values, box = self.tensor.detach(), self.box()
        parts = rows_of(self.held.shape, box.offsets, box.shape)
        numbers = torch.cat([rows.numbers(values.device) for rows in parts])
        return rounded(values, noise(numbers.to(torch.int32).view(values.shape), key))

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.detach().chunk(self.parts)[self.part] if self.parts > 1 else whole.detach()


def trained_tensors(
    held: Mapping[str, LocalParameter],
    *,
    master: torch.dtype | None,
    sharing: Callable[[LocalParameter], StateSharding],
) -> dict[str, TrainedTensor]:
    """Return the tensor of each parameter that is trained, by global name.

    Args:
        held: of this rank, with the values that masters begin with.
        master: dtype of masters; None keeps none.
        sharing: says which ranks share the optimizer's state of a parameter.
    """
    return {name: _trained(each, master, sharing(each)) for name, each in held.items() if each.parameter.requires_grad}


def _trained(held: LocalParameter, master: torch.dtype | None, sharing: StateSharding) -> TrainedTensor:
    parameter, parts = held.parameter, sharing.parts
    divides = parameter.ndim > 0 and parts > 1 and parameter.shape[0] % parts == 0
    own, part = (parts, sharing.part) if divides else (1, 0)
    tensor = parameter
    if divides or master is not None:
        values = parameter.detach().chunk(own)[part] if divides else parameter.detach()
        tensor = nn.Parameter(values.to(master or parameter.dtype, copy=True))
    return TrainedTensor(held=held, tensor=tensor, part=part, parts=own, group=sharing.group)


class GradientAccumulator:
    """Sums of gradients over micro-batches in a dtype wider than that of the parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        """Sum up after each backward; the sums are in the attribute ``main_grad``, which the library knows, too."""
        for parameter in parameters:
            if parameter.requires_grad and parameter.dtype != dtype:
                parameter.main_grad = None  # type: ignore[attr-defined]
                parameter.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]
        self._dtype = dtype

    def _add(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        gradient, before = parameter.grad.to(self._dtype), parameter.main_grad  # type: ignore[attr-defined]
        parameter.main_grad = gradient if before is None else before.add_(gradient)  # type: ignore[attr-defined]
        parameter.grad = None


def gradient_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the sum of a parameter's gradients."""
    found: torch.Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if found is None else found


def clear_gradient(parameter: nn.Parameter) -> None:
    """Drop the sum of a parameter's gradients."""
    parameter.grad = None
    if hasattr(parameter, "main_grad"):
        parameter.main_grad = None
