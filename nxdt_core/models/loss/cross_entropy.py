"""Cross-entropy over the vocabulary, a token or summed and weighted, in bounded memory.

Logits are the largest tensor of many a run. A head that receives the labels returns :class:`TokenLosses` in their place
and need not hold them all at once. An objective that takes logits only for their cross-entropy sees no difference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.errors.models import LossesAreNotLogits
from nxdt_core.models.loss.logit_rows import IN_CHUNKS, RowKernels, row_chunks, row_cross_entropies
from nxdt_core.models.step_border import step_of
from nxdt_core.protocols.batch import IGNORE_INDEX
from nxdt_core.protocols.step_context import StepContext

__all__ = [
    "TokenLosses",
    "cross_entropies",
    "cross_entropy_sum",
    "head_output",
    "log_partition",
    "log_probs",
    "row_weights",
    "whole_vocabulary_cross_entropies",
]

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


def cross_entropies(logits: torch.Tensor, labels: torch.Tensor, step: StepContext | None = None) -> torch.Tensor:
    """Return the cross-entropy of each label, which is its negative log-probability; means nothing where the label is
    −100.

    Computed in float32 (float64 for float64 logits), some rows at a time, and the gradient comes out in the logits'
    dtype: in addition to the logits only their gradient is held whole, where ``F.cross_entropy`` holds full-precision
    log-probabilities too. Differentiable once, in ``logits`` alone.

    Args:
        logits: [..., vocab], any floating dtype, or what the engine's loss in ``step`` takes; or the losses of a head
            that computes these itself (:class:`~nxdt_core.models.loss.cross_entropy.TokenLosses`).
        labels: int64 [...]; −100 takes no part.
        step: as the objective got it.

    Returns:
        [...], in the dtype of accumulation.
    """
    if isinstance(logits, TokenLosses):
        return logits.of(labels)
    return (step_of(step).vocabulary_loss or whole_vocabulary_cross_entropies)(logits, labels)


def log_probs(logits: torch.Tensor, labels: torch.Tensor, step: StepContext | None = None) -> torch.Tensor:
    """Return the log-probability of each label, 0 where it is −100; otherwise as :func:`cross_entropies`."""
    return cross_entropies(logits, labels, step).neg().masked_fill(labels == IGNORE_INDEX, 0)


def log_partition(logits: torch.Tensor, step: StepContext | None = None) -> torch.Tensor:
    """Return the log-sum-exp of each row of logits [..., vocab], whose square a z-loss adds (PaLM, arXiv:2204.02311).

    It works in every layout, also where ranks share the vocabulary, and is computed like :func:`cross_entropies`.
    Differentiable once.

    Returns:
        [...], in the dtype of accumulation.

    Raises:
        LossesAreNotLogits: the head computes losses itself (``model.loss_chunk_tokens``).
    """
    if isinstance(logits, TokenLosses):
        raise LossesAreNotLogits(use="log_partition")
    return (step_of(step).vocabulary_loss or whole_vocabulary_cross_entropies)(logits, None)


def cross_entropy_sum(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | None = None,
    step: StepContext | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of the :func:`cross_entropies`, and the sum of the weights: their quotient is the mean loss.

    Args:
        logits: as there.
        labels: as there.
        weights: float [...], or None for 1 everywhere.
        step: as there.

    Returns:
        ``(loss_sum, weight)``, scalars in the dtype of accumulation.
    """
    losses = cross_entropies(logits, labels, step).flatten()
    counts, _ = row_weights(losses, labels, weights)
    return (losses * counts).sum(), counts.sum()


def whole_vocabulary_cross_entropies(
    logits: torch.Tensor, labels: torch.Tensor | None, kernels: RowKernels = IN_CHUNKS
) -> torch.Tensor:
    """:func:`cross_entropies`, or :func:`log_partition` without ``labels``, of ``logits`` whose rows are whole."""
    rows = logits.reshape(-1, logits.shape[-1])
    if labels is None:
        columns = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        no_hits = rows.new_zeros(len(rows), dtype=torch.promote_types(rows.dtype, torch.float32))
        sums = row_cross_entropies(
            rows, columns, kernels, hits=no_hits, combine=lambda sums, at: (sums, torch.zeros_like(at))
        )
        return sums.view(logits.shape[:-1])
    _, targets = row_weights(rows, labels, None)
    if kernels is not IN_CHUNKS:
        return row_cross_entropies(rows, targets, kernels).view(labels.shape)
    losses: torch.Tensor = _CrossEntropies.apply(rows, targets)  # type: ignore[no-untyped-call]
    return losses.view(labels.shape)


def row_weights(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what each row counts, in the dtype of accumulation, and its target; 0 and id 0 where the label is −100."""
    targets = labels.reshape(-1)
    accumulation = torch.promote_types(logits.dtype, torch.float32)
    kept = targets != IGNORE_INDEX
    counts = kept.to(accumulation) if weights is None else weights.reshape(-1).to(accumulation) * kept
    return counts, targets.masked_fill(~kept, 0)


class _CrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, targets)
        losses = rows.new_empty(len(rows), dtype=torch.promote_types(rows.dtype, torch.float32))
        for part in row_chunks(rows):
            log_probabilities = functional.log_softmax(rows[part], dim=1, dtype=losses.dtype)
            losses[part] = log_probabilities.gather(1, targets[part, None]).squeeze(1)
        return losses.neg_()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        rows, targets = ctx.saved_tensors
        scale = grad[:, None]
        grad_rows = torch.empty_like(rows)
        for part in row_chunks(rows):
            probabilities = functional.softmax(rows[part], dim=1, dtype=grad.dtype)
            probabilities.scatter_add_(1, targets[part, None], -torch.ones_like(scale[part]))
            grad_rows[part] = probabilities.mul_(scale[part])
        return grad_rows, None
