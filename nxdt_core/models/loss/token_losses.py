"""Losses in the place of logits: what a head returns that computes the cross-entropies of its tokens itself.

Logits are the largest tensor of many a run. A head that receives the labels need not hold them all at once, and an
objective that takes logits for nothing but their cross-entropy does not see the difference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nxdt_core.errors.models import LossesAreNotLogits
from nxdt_core.protocols.step_context import StepContext

__all__ = ["TokenLosses", "head_output"]

_HARMLESS = frozenset(
    (
        *("__get__", "__repr__", "_is_view", "dim", "is_complex", "is_floating_point", "numel", "size"),
        *("detach", "detach_", "register_hook", "untyped_storage"),
    )
)
"""What pipelines, hooks and debuggers ask of an output without reading its values."""


def head_output(head: nn.Module, hidden: torch.Tensor, step: StepContext | None) -> torch.Tensor:
    """Return the logits of ``hidden`` [batch, seq, hidden]. A head that an engine lets compute losses takes ``step``,
    too, and gives those of its labels if it has any (:class:`TokenLosses`)."""
    output: torch.Tensor = head(hidden, step) if hasattr(head, "computes_losses") else head(hidden)
    return output


class TokenLosses(torch.Tensor):
    """Cross-entropies [batch, seq] of one micro-batch, which only :func:`~nxdt_core.models.loss.cross_entropies` takes.

    Any other use fails instead of being wrong silently.
    """

    labels: torch.Tensor

    @classmethod
    def wrap(cls, losses: torch.Tensor, labels: torch.Tensor) -> TokenLosses:
        """``losses`` of ``labels``, both [batch, seq]."""
        wrapped = losses.as_subclass(cls)
        wrapped.labels = labels
        return wrapped

    def of(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the losses, as a plain tensor.

        Raises:
            LossesAreNotLogits: ``labels`` are not those that the losses are of.
        """
        if labels is not self.labels:
            raise LossesAreNotLogits(use="the loss of other labels than the batch's")
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse every operation that would read the values."""
        name = getattr(func, "__name__", str(func))
        if name not in _HARMLESS:
            raise LossesAreNotLogits(use=name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
