"""A call of the caller's module as data, its rows in micro-batches, and the loss in what the module returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map, tree_map_only

from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.objective import Objective, ObjectiveOutput
from nxdt_core.protocols.step_context import StepContext
from nxdt_plugin_nxd_core.errors import BatchDoesNotDivide, LossNotFound, OutputNotTensors

__all__ = ["CallBatch", "ModelLoss", "loss_in", "scaled_gradients", "split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBatch(Batch):
    """One micro-batch: the arguments of a forward of the caller's module."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallBatch:
        """Return the batch of a call; its first tensor counts the rows."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        first, labels = tensors[0] if tensors else torch.zeros(1, 1, dtype=torch.int64), kwargs.get("labels")
        own = labels if isinstance(labels, torch.Tensor) else first
        return cls(input_ids=first, labels=own, args=args, kwargs=kwargs)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> CallBatch:
        """Return the batch with its tensors changed, those within lists and dictionaries, too."""
        changed = CallBatch.of(*tree_map_only(torch.Tensor, change, (self.args, dict(self.kwargs))))
        return replace(changed, first_row=self.first_row)

    def arguments(self) -> dict[str, Any]:
        """Return the batch itself, whose arguments the module's forward takes."""
        return {"call": self}


def split(call: CallBatch, micro_batches: int) -> list[CallBatch]:
    """Split the rows of a call; what does not have as many rows goes to each micro-batch.

    Raises:
        BatchDoesNotDivide: the rows do not fall into equal parts.
    """
    tensors = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, torch.Tensor)]
    rows = next((len(tensor) for tensor in tensors if tensor.ndim), 0)
    if micro_batches == 1:
        return [call]
    if rows == 0 or rows % micro_batches:
        raise BatchDoesNotDivide(rows=rows, micro_batches=micro_batches)
    size = rows // micro_batches

    def part(tensor: torch.Tensor, begin: int) -> torch.Tensor:
        return tensor if tensor.ndim == 0 or len(tensor) != rows else tensor[begin : begin + size]

    return [call.map(partial(part, begin=begin)) for begin in range(0, rows, size)]


class ModelLoss(Objective):
    """The objective of a model that computes its loss itself: the mean over micro-batches of all data parallel
    ranks."""

    def __init__(self, config: Any = None) -> None:
        self._where = config

    def weight(self, batch: Batch) -> torch.Tensor:
        """Return 1: micro-batches count equally."""
        return torch.ones(())

    def __call__(self, logits: Any, batch: Batch, step: StepContext) -> ObjectiveOutput:
        """Return the loss in what the model returned."""
        loss = loss_in(logits, self._where)
        return ObjectiveOutput(loss_sum=loss, weight=torch.ones_like(loss.detach()))


def loss_in(output: Any, where: Any = None) -> torch.Tensor:
    """Return the loss in what a model returned.

    Args:
        output: a scalar, a tuple or list that begins with one, or an object with ``loss``.
        where: ``output_loss_value_spec``: True in the place of the loss.

    Raises:
        LossNotFound: there is none.
    """
    if where is not None:
        found = _at(output, where)
    elif isinstance(output, torch.Tensor):
        found = output
    elif isinstance(output, Mapping) or getattr(output, "loss", None) is not None:
        found = _at(output, {"loss": True})
    else:
        found = output[0] if isinstance(output, tuple | list) and output else None
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        shape = f"a tensor of shape {list(output.shape)}" if isinstance(output, torch.Tensor) else type(output).__name__
        raise LossNotFound(found=shape)
    return found.reshape(())


def _at(output: Any, where: Any) -> Any:
    """Return what is in ``output`` where ``where`` has True."""
    if where is True:
        return output
    if isinstance(where, Mapping):
        chosen = next((key for key, here in where.items() if here), None)
        return output.get(chosen) if isinstance(output, Mapping) else getattr(output, str(chosen), None)
    if isinstance(where, tuple | list) and isinstance(output, tuple | list) and any(where):
        place = next(number for number, here in enumerate(where) if here)
        return _at(output[place], where[place]) if place < len(output) else None
    return None


def scaled_gradients(output: Any, ranks: int) -> Any:
    """Return ``output`` with gradients divided by ``ranks``, so that their sum over the ranks is their mean.

    Raises:
        OutputNotTensors: tensors that need gradients may be in what cannot be looked into.
    """
    if ranks == 1:
        return output

    def scaled(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                value = value.view_as(value)  # the gradients of other uses within the module stay as they are
                value.register_hook(lambda grad: grad * (1 / ranks))
            return value
        if is_dataclass(value) and not isinstance(value, type):
            parts = {each.name: scaled_gradients(getattr(value, each.name), ranks) for each in fields(value)}
            return replace(value, **parts)
        if value is None or isinstance(value, int | float | str | bytes | torch.Size | torch.dtype):
            return value
        raise OutputNotTensors(found=type(value).__name__, ranks=ranks)

    return tree_map(scaled, output)
