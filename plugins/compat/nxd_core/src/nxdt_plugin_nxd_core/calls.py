"""A call of the caller's module as data, its rows in micro-batches, and the loss in what the module returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.objective import Objective, ObjectiveOutput
from nxdt_core.protocols.step_context import StepContext
from nxdt_plugin_nxd_core.errors import BatchDoesNotDivide, LossNotFound, OutputNotTensors

__all__ = ["Call", "CallBatch", "ModelLoss", "loss_in", "scaled_gradients", "split"]


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one forward."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """Return the call with its tensors changed, those within lists and dictionaries, too."""

        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, torch.Tensor) else value

        return Call(tree_map(changed, self.args), tree_map(changed, dict(self.kwargs)))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors among the arguments."""
        return (value for value in (*self.args, *self.kwargs.values()) if isinstance(value, torch.Tensor))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBatch(Batch):
    """One micro-batch of a caller's own arguments."""

    call: Call = field(default_factory=lambda: Call((), {}))

    @classmethod
    def of(cls, call: Call) -> CallBatch:
        """Return the batch of a call; its first tensor counts the rows."""
        first = next(call.tensors(), torch.zeros(1, 1, dtype=torch.int64))
        labels = call.kwargs.get("labels")
        return cls(input_ids=first, labels=labels if isinstance(labels, torch.Tensor) else first, call=call)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> CallBatch:
        """Return a batch whose tensors are those that ``change`` makes of this one's."""
        made = CallBatch.of(self.call.map(change))
        return replace(made, first_row=self.first_row)

    def arguments(self) -> dict[str, Any]:
        """Return the call itself, which the module's forward unpacks."""
        return {"call": self.call}


def split(call: Call, micro_batches: int) -> list[CallBatch]:
    """Split the rows of a call; what does not have as many rows goes to each micro-batch.

    Raises:
        BatchDoesNotDivide: the rows do not fall into equal parts.
    """
    if micro_batches == 1:
        return [CallBatch.of(call)]
    rows = next((len(tensor) for tensor in call.tensors() if tensor.ndim), 0)
    if rows == 0 or rows % micro_batches:
        raise BatchDoesNotDivide(rows=rows, micro_batches=micro_batches)
    size = rows // micro_batches

    def part(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def rows_of(tensor: torch.Tensor) -> torch.Tensor:
            whole = tensor.ndim == 0 or len(tensor) != rows
            return tensor if whole else tensor[number * size : (number + 1) * size]

        return rows_of

    return [CallBatch.of(call.map(part(number))) for number in range(micro_batches)]


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
    found = _by_spec(output, where) if where is not None else _by_custom(output)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        shape = f"a tensor of shape {list(output.shape)}" if isinstance(output, torch.Tensor) else type(output).__name__
        raise LossNotFound(found=shape)
    return found.reshape(())


def _by_custom(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    if getattr(output, "loss", None) is not None:
        return output.loss
    return output[0] if isinstance(output, tuple | list) and output else None


def _by_spec(output: Any, where: Any) -> Any:
    if where is True:
        return output
    if isinstance(where, Mapping):
        chosen = next((key for key, here in where.items() if here), None)
        return output.get(chosen) if isinstance(output, Mapping) else getattr(output, str(chosen), None)
    if isinstance(where, tuple | list) and isinstance(output, tuple | list) and any(where):
        place = next(number for number, here in enumerate(where) if here)
        return _by_spec(output[place], where[place]) if place < len(output) else None
    return None


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def scaled_gradients(output: Any, ranks: int) -> Any:
    """Return ``output`` with gradients divided by ``ranks``, so that their sum over the ranks is their mean.

    Raises:
        OutputNotTensors: tensors that need gradients may be in what cannot be looked into.
    """
    if ranks == 1:
        return output

    def scaled(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _ScaledGradient.apply(value, 1 / ranks) if value.requires_grad else value  # type: ignore[no-untyped-call]
        if is_dataclass(value) and not isinstance(value, type):
            parts = {each.name: scaled_gradients(getattr(value, each.name), ranks) for each in fields(value)}
            return replace(value, **parts)
        if value is None or isinstance(value, int | float | str | bytes | torch.Size | torch.dtype):
            return value
        raise OutputNotTensors(found=type(value).__name__, ranks=ranks)

    return tree_map(scaled, output)
