"""Cross-entropy over the vocabulary, per token or summed and weighted, in bounded memory.

Logits are often the largest tensor of a run. :class:`RowKernels` are the two passes over their rows, which an engine
may compile. A head that receives the labels returns :class:`TokenLosses` and never holds all logits at once. An
objective that takes logits only for their cross-entropy sees no difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.config.schema import CausalLMConfig
from nxdt_core.distributed.collectives import reduce_from_group
from nxdt_core.distributed.devices import profile_of
from nxdt_core.distributed.placement import is_dtensor
from nxdt_core.errors.models import LossesAreNotLogits
from nxdt_core.models.step_boundary import step_of
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch
from nxdt_core.protocols.objective import Objective, ObjectiveOutput, ObjectiveTraits
from nxdt_core.protocols.step_context import StepContext

_CHUNK_ELEMENTS_IN_CACHE = 1 << 18
"""Logits in full precision at a time: 1 MiB of float32, which stays in a core's cache. Against ``F.cross_entropy``,
forward and backward took 0.64 of the time at 4,096 words and 0.43 at 32,000."""
_CHUNK_ELEMENTS = 1 << 26
"""Elsewhere, where each chunk costs five kernel launches: 256 MiB of float32."""

_HARMLESS = frozenset(
    (
        *("__get__", "__repr__", "_is_view", "dim", "is_complex", "is_floating_point", "numel", "size"),
        *("detach", "detach_", "register_hook", "untyped_storage"),
    )
)
"""Functions that pipelines, hooks and debuggers call on an output without reading its values."""


Combine = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class RowKernels:
    """The passes: those of :data:`IN_CHUNKS`, or what an engine compiled.

    Args:
        sums: ``(rows, columns, dtype)`` gives of each row its log-sum-exp and its element in ``columns`` [rows], both
            [rows] in ``dtype``.
        gradients: ``(rows, columns, log_sums, hits, scale, out)`` writes the gradient of the rows' cross-entropies,
            softmax less what is hit, times scale, to ``out``, which may be ``rows``. ``log_sums`` are those of the
            whole rows, of which these may be a part; ``hits`` is −1 where the target is in this part, else 0;
            ``scale`` is the gradient of the row's loss; each [rows].
    """

    sums: Callable[[torch.Tensor, torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
    gradients: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
    ]


def row_cross_entropies(
    rows: torch.Tensor,
    columns: torch.Tensor,
    kernels: RowKernels,
    *,
    hits: torch.Tensor | None = None,
    combine: Combine | None = None,
) -> torch.Tensor:
    """Return the cross-entropies of rows by ``kernels``, [rows]; differentiable once, in ``rows``.

    Args:
        rows: logits [rows, columns]; other ranks may hold the rest of each row.
        columns: int64 [rows], the target's index in each row.
        kernels: the passes over the rows.
        hits: as for :class:`RowKernels`; None for −1 everywhere.
        combine: makes log-sum-exps and targets' logits of whole rows from those of these parts.
    """
    return _OfRows.apply(rows, columns, kernels, hits, combine)  # type: ignore[no-untyped-call, no-any-return]


class _OfRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        columns: torch.Tensor,
        kernels: RowKernels,
        hits: torch.Tensor | None,
        combine: Combine | None,
    ) -> torch.Tensor:
        ctx.kernels = kernels
        log_sums, at = kernels.sums(rows, columns, torch.promote_types(rows.dtype, torch.float32))
        if combine is not None:
            log_sums, at = combine(log_sums, at)
        ctx.save_for_backward(rows, columns, hits, log_sums)
        return log_sums - at

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        rows, columns, hits, log_sums = ctx.saved_tensors
        hits = -torch.ones_like(log_sums) if hits is None else hits
        gradient = ctx.kernels.gradients(rows, columns, log_sums, hits, grad, torch.empty_like(rows))
        return gradient, None, None, None, None


def row_chunks(rows: torch.Tensor, copies: int = 1) -> list[slice]:
    """Parts of ``rows`` [rows, columns] of which so many full-precision copies are small together: in cache, or bounded
    in memory."""
    elements = _CHUNK_ELEMENTS_IN_CACHE if profile_of(rows.device).cache_bound_kernels else _CHUNK_ELEMENTS
    step = max(1, elements // (rows.shape[1] * copies))
    return [slice(start, start + step) for start in range(0, len(rows), step)]


def _sums(rows: torch.Tensor, columns: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of :class:`RowKernels`."""
    sums, at = rows.new_empty((2, len(rows)), dtype=dtype).unbind()
    for part in row_chunks(rows):
        values = rows[part].to(dtype)
        sums[part] = torch.logsumexp(values, dim=1)
        at[part] = values.gather(1, columns[part, None]).squeeze(1)
    return sums, at


def _gradients(
    rows: torch.Tensor,
    columns: torch.Tensor,
    log_sums: torch.Tensor,
    hits: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """The second of :class:`RowKernels`."""
    for part in row_chunks(rows):
        probabilities = torch.sub(rows[part], log_sums[part, None]).exp_()  # in the dtype of log_sums
        probabilities.scatter_add_(1, columns[part, None], hits[part, None])
        out[part] = probabilities.mul_(scale[part, None])
    return out


IN_CHUNKS = RowKernels(_sums, _gradients)
"""Some rows at a time, in stock operations: full-precision copies of those alone exist."""


def head_output(
    head: nn.Module, hidden: torch.Tensor, step: StepContext | None, *, softcap: float | None = None
) -> torch.Tensor:
    """Return the logits of ``hidden`` [batch, seq, hidden]. A head that an engine lets compute losses takes ``step``,
    too, and gives those of its labels if it has any (:class:`TokenLosses`).

    ``softcap``: logits are ``softcap · tanh(logit / softcap)`` (Gemma 2, arXiv:2408.00118); None: as they are.
    """
    if hasattr(head, "computes_losses"):
        output: torch.Tensor = head(hidden, step, softcap)
        return output
    output = head(hidden)
    if softcap is None or isinstance(head, nn.Identity):  # hidden states have no cap
        return output
    return softcapped(output, softcap)


def softcapped(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    """Return ``softcap · tanh(logits / softcap)``."""
    return torch.tanh(logits / softcap) * softcap


class TokenLosses(torch.Tensor):
    """Cross-entropies [batch, seq] of one micro-batch, which only :func:`~nxdt_core.models.loss.cross_entropies` takes;
    or what an objective's own ``head_loss`` returned, [batch, seq, terms].

    Any other use fails instead of being wrong silently.
    """

    labels: torch.Tensor

    @classmethod
    def wrap(cls, losses: torch.Tensor, labels: torch.Tensor) -> TokenLosses:
        """Return ``losses`` [batch, seq] or [batch, seq, terms] with their ``labels`` [batch, seq]."""
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
            that computes these itself (:class:`~nxdt_core.models.loss.TokenLosses`).
        labels: int64 [...]; −100 takes no part.
        step: context of the micro-batch, as the objective received it.

    Returns:
        [...], in the dtype of accumulation.
    """
    if isinstance(logits, TokenLosses):
        return logits.of(labels)
    return (step_of(step).vocabulary_loss or whole_vocabulary_cross_entropies)(logits, labels)


def log_probs(
    logits: torch.Tensor, labels: torch.Tensor, step: StepContext | None = None, *, temperature: float = 1.0
) -> torch.Tensor:
    """Return the log-probability of each label, 0 where it is −100; otherwise as :func:`cross_entropies`.

    ``temperature`` divides the logits.
    """
    logits = logits if temperature == 1 else logits / temperature
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
    *,
    smoothing: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted sum of the :func:`cross_entropies`, and the sum of the weights: their quotient is the mean
    loss.

    Args:
        logits: [..., vocab], as for :func:`cross_entropies`.
        labels: int64 [...]; −100 takes no part.
        weights: float [...], or None for 1 everywhere.
        step: context of the micro-batch.
        smoothing: share of each label's probability that is spread evenly over the vocabulary, as of
            ``F.cross_entropy`` (Szegedy et al. 2016, arXiv:1512.00567).

    Returns:
        ``(loss_sum, weight)``, scalars in the dtype of accumulation.

    Raises:
        LossesAreNotLogits: with ``smoothing``, the head computes losses itself (``model.loss_chunk_tokens``).
    """
    losses = cross_entropies(logits, labels, step)
    if smoothing:
        partition, dtype = log_partition(logits, step), torch.promote_types(logits.dtype, torch.float32)
        if is_dtensor(logits):  # ranks hold parts of each row
            local: torch.Tensor = logits.to_local()
            total = reduce_from_group(local.sum(-1, dtype=dtype), logits.device_mesh.get_group())
            means = total / logits.shape[-1]
        else:
            means = logits.mean(-1, dtype=dtype)
        losses = (1 - smoothing) * losses + smoothing * (partition - means)
    losses = losses.flatten()
    counts = row_weights(labels, weights, torch.promote_types(losses.dtype, torch.float32))
    return (losses * counts).sum(), counts.sum()


class CausalLM(Objective):
    """Cross-entropy between logits and the labels, which are shifted already; −100 is ignored."""

    def __init__(self, config: CausalLMConfig | None = None) -> None:
        self._smoothing = 0.0 if config is None else config.label_smoothing
        # The exponential of a mean over tokens is shown as a perplexity, which a smoothed loss has none of.
        self.traits = ObjectiveTraits(unit="labels" if self._smoothing else "tokens")

    def __call__(self, logits: torch.Tensor, batch: Batch, step: StepContext | None = None) -> ObjectiveOutput:
        """Return the summed cross-entropy of ``logits`` [micro_batch, seq, vocab] and its weight."""
        smoothing = self._smoothing
        loss_sum, weight = cross_entropy_sum(logits, batch.labels, batch.loss_weights, step, smoothing=smoothing)
        return ObjectiveOutput(loss_sum=loss_sum, weight=weight)


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
    targets = target_ids(labels)
    if kernels is not IN_CHUNKS:
        return row_cross_entropies(rows, targets, kernels).view(labels.shape)
    losses: torch.Tensor = _CrossEntropies.apply(rows, targets)  # type: ignore[no-untyped-call]
    return losses.view(labels.shape)


def target_ids(labels: torch.Tensor) -> torch.Tensor:
    """Return the target of each row [rows], which is id 0 where the label is −100."""
    targets = labels.reshape(-1)
    return targets.masked_fill(targets == IGNORE_INDEX, 0)


def row_weights(labels: torch.Tensor, weights: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of each row [rows] in ``dtype``, which is 0 where the label is −100."""
    labelled = labels.reshape(-1) != IGNORE_INDEX
    return labelled.to(dtype) if weights is None else weights.reshape(-1).to(dtype) * labelled


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
