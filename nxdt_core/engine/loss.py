"""Cross-entropy of logits that are sharded by vocabulary, and heads that compute the losses of some tokens at a time.

Sharded: no rank holds a whole row of logits. Each row needs two numbers of each rank, its log-sum-exp and the target's
logit: one small all-gather in forward, nothing in backward.

Some tokens at a time: the logits of all tokens are never held. Forward keeps one number per token, and backward
computes the logits of each chunk again, which adds a third to the work of the head. (``F.linear_cross_entropy`` of
torch 2.13 takes gradients in forward. It has no weights of tokens, and no ranks that share the vocabulary.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from nxdt_core.distributed.placement import is_dtensor, is_fsdp_module, shard_over_mesh
from nxdt_core.distributed.torch_versions import all_gather_single
from nxdt_core.engine.compile import one_graph
from nxdt_core.engine.tensor.layers import VocabParallelHead, local_part, local_vocab_rows
from nxdt_core.errors.models import HeadNotLinear, ModelWithoutHead
from nxdt_core.models.autocast import compute_dtype
from nxdt_core.models.loss import (
    IN_CHUNKS,
    RowKernels,
    TokenLosses,
    cross_entropies,
    row_cross_entropies,
    softcapped,
    target_ids,
    whole_vocabulary_cross_entropies,
)
from nxdt_core.models.patterns import modules_at, styled
from nxdt_core.models.step_boundary import step_of
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.step_context import StepContext

__all__ = [
    "ChunkedHead",
    "chunk_loss",
    "compiled_rows",
    "linear_cross_entropies",
    "vocabulary_parallel_cross_entropies",
]


def chunk_loss(module: nn.Module, plan: ParallelPlan, *, tokens: int, kernels: RowKernels = IN_CHUNKS) -> None:
    """Let the heads of ``module`` return :class:`TokenLosses` where a loss is what their output is for.

    In place, without a change to the names of modules and parameters.

    Args:
        module: one pipeline stage, sharded already; without a head where it is not the last.
        plan: names the heads (``vocab_head``).
        tokens: whose logits are held at a time.
        kernels: the passes over their rows.

    Raises:
        ModelWithoutHead: the plan names none.
        HeadNotLinear: a head is something else than a linear layer.
    """
    heads = styled(plan, "vocab_head")
    if not heads:
        raise ModelWithoutHead()
    for path, head in modules_at(module, heads).items():
        if type(head) not in (nn.Linear, VocabParallelHead) or getattr(head, "update", None) is not None:
            raise HeadNotLinear(path=path, kind=type(head).__qualname__)
        head.forward = _ChunkedForward(module, head, tokens, kernels)
        head.computes_losses = True


class _ChunkedForward:
    """The forward of a head."""

    def __init__(self, stage: nn.Module, head: nn.Module, tokens: int, kernels: RowKernels) -> None:
        self._stage, self._head, self._tokens, self._kernels = stage, head, tokens, kernels
        self._logits: Callable[[torch.Tensor], torch.Tensor] = head.forward

    def __call__(
        self, hidden: torch.Tensor, step: StepContext | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        """Losses, or logits where these are what is asked for, of ``hidden`` [batch, seq, hidden]."""
        step = step_of(step)
        labels = step.labels
        if labels is None:
            logits = self._logits(hidden)
            return logits if softcap is None else softcapped(logits, softcap)
        chunked = ChunkedHead(self._stage, self._head, hidden.flatten(0, -2), self._tokens, softcap=softcap)
        if step.head_loss is not None:
            return TokenLosses.wrap(step.head_loss(chunked, step).view(*labels.shape, -1), labels)
        if softcap is not None:
            targets = labels.flatten()
            losses = chunked.measured(lambda logits, part: cross_entropies(logits, targets[part], step).unsqueeze(-1))
            return TokenLosses.wrap(losses.view(labels.shape), labels)
        head = self._head
        group = head.mesh.get_group() if isinstance(head, VocabParallelHead) else None
        inputs = chunked.inputs(hidden)
        losses = linear_cross_entropies(*inputs, labels, tokens=self._tokens, kernels=self._kernels, group=group)
        return TokenLosses.wrap(losses, labels)


class ChunkedHead:
    """A head and what it is applied to, for a loss that is computed from the logits of some tokens at a time."""

    def __init__(
        self, stage: nn.Module, head: nn.Module, hidden: torch.Tensor, tokens: int, *, softcap: float | None = None
    ) -> None:
        """``stage`` has the ``head``; ``hidden`` [rows, hidden]; ``tokens`` are those of a chunk; ``softcap``: as of
        :func:`nxdt_core.models.loss.head_output`."""
        self._stage, self._head, self._tokens, self._dtype = stage, head, tokens, compute_dtype(hidden)
        self.hidden, self._softcap = hidden, softcap

    def logits(self, part: slice) -> torch.Tensor:
        """Return the logits of some rows, without gradients; also after the pass of the head's model. Collective."""
        for module in (self._stage, self._head):
            if is_fsdp_module(module):
                module.unshard()
        with torch.no_grad():
            return self._capped(functional.linear(*self.inputs(self.hidden[part])))

    def measured(self, measure: Callable[[torch.Tensor, slice], torch.Tensor]) -> torch.Tensor:
        """Return what ``measure`` makes of the logits of all rows: [rows, terms]; differentiable once.

        Args:
            measure: called with the logits of some rows, as :meth:`logits` returns them, and with these rows; it
                returns [rows, terms], equal on all ranks that share the vocabulary. Backward calls it again.
        """
        measures: torch.Tensor = _Measured.apply(  # type: ignore[no-untyped-call]
            *self.inputs(self.hidden), self._tokens, lambda local, part: measure(self._capped(local), part)
        )
        return measures

    def inputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return ``hidden``, this rank's weight and its bias, in the dtype of matrix products."""
        weight, bias = self._head.weight, self._head.bias
        local_weight = local_part(weight).to(self._dtype)  # type: ignore[arg-type]
        return hidden.to(self._dtype), local_weight, None if bias is None else local_part(bias).to(self._dtype)  # type: ignore[arg-type]

    def _capped(self, local: torch.Tensor) -> torch.Tensor:
        """Return the logits, which ranks may share, from this rank's product."""
        if self._softcap is not None:
            local = softcapped(local, self._softcap)
        if not isinstance(self._head, VocabParallelHead):
            return local
        return shard_over_mesh(local, self._head.mesh, -1)


class _Measured(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: int,
        measure: Callable[[torch.Tensor, slice], torch.Tensor],
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.tokens, ctx.measure = tokens, measure
        chunks = _chunks(hidden, tokens)
        return torch.cat([measure(functional.linear(hidden[part], weight, bias), part) for part in chunks])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors

        def of_logits(logits: torch.Tensor, part: slice) -> torch.Tensor:
            with torch.enable_grad():
                values = ctx.measure(logits.requires_grad_(), part)
            (gradient,) = torch.autograd.grad(values, logits, grad[part])
            return gradient

        return *_gradients_of_linear(ctx, hidden, weight, bias, of_logits), None, None


def linear_cross_entropies(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    tokens: int,
    kernels: RowKernels = IN_CHUNKS,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the cross-entropies of a linear layer's outputs, in float32 (float64 for float64); differentiable once.

    Args:
        hidden: [..., hidden].
        weight: [vocab, hidden]; of ``group``, this rank's rows.
        bias: [vocab], likewise.
        labels: int64 [...]; −100 gives a loss that means nothing.
        tokens: whose logits are held at a time.
        kernels: the passes over their rows.
        group: ranks that share the vocabulary; gradients of ``hidden`` are then partial sums.

    Returns:
        [...], equal on all ranks.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    losses: torch.Tensor = _CrossEntropies.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, target_ids(labels), tokens, kernels, group
    )
    return losses.view(labels.shape)


class _CrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        tokens: int,
        kernels: RowKernels,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        columns, elsewhere = (targets, None) if group is None else local_vocab_rows(targets, len(weight), group)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        ctx.kernels = kernels
        log_sums, at_target = hidden.new_empty((2, len(hidden)), dtype=dtype).unbind()
        for chunk in _chunks(hidden, tokens):
            sums = ctx.kernels.sums(functional.linear(hidden[chunk], weight, bias), columns[chunk], dtype)
            log_sums[chunk], at_target[chunk] = sums
        if group is not None and elsewhere is not None:
            log_sums, at_target = combine_vocab_shards(log_sums, at_target, elsewhere, group)
        ctx.save_for_backward(hidden, weight, bias, columns, elsewhere, log_sums)
        ctx.tokens = tokens
        return log_sums - at_target

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, columns, elsewhere, log_sums = ctx.saved_tensors
        hits = -torch.ones_like(log_sums)
        if elsewhere is not None:
            hits = hits.masked_fill_(elsewhere, 0)

        def of_logits(logits: torch.Tensor, chunk: slice) -> torch.Tensor:
            saved = columns[chunk], log_sums[chunk], hits[chunk], grad[chunk]
            return ctx.kernels.gradients(logits, *saved, logits)  # type: ignore[no-any-return]

        return *_gradients_of_linear(ctx, hidden, weight, bias, of_logits), None, None, None, None


def _gradients_of_linear(
    ctx: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    of_logits: Callable[[torch.Tensor, slice], torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of a linear layer's inputs and parameters, where ``of_logits`` makes those of some rows of
    its outputs, which it may overwrite."""
    sums = torch.promote_types(hidden.dtype, torch.float32)
    grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
    # In full precision: a sum over chunks in the weights' own would be rounded with each.
    grad_weight = torch.zeros_like(weight, dtype=sums) if ctx.needs_input_grad[1] else None
    grad_bias = torch.zeros_like(bias, dtype=sums) if bias is not None and ctx.needs_input_grad[2] else None
    for chunk in _chunks(hidden, ctx.tokens):
        rows = of_logits(functional.linear(hidden[chunk], weight, bias), chunk)
        if grad_hidden is not None:
            torch.mm(rows, weight, out=grad_hidden[chunk])
        if grad_weight is not None:
            if rows.dtype == grad_weight.dtype:
                grad_weight.addmm_(rows.t(), hidden[chunk])
            else:
                grad_weight += rows.t() @ hidden[chunk]
        if grad_bias is not None:
            grad_bias += rows.sum(0, dtype=grad_bias.dtype)
        del rows  # before those of the next chunk are made
    return (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


def _chunks(rows: torch.Tensor, tokens: int) -> list[slice]:
    return [slice(start, start + tokens) for start in range(0, len(rows), tokens)]


@functools.cache
def compiled_rows(backend: str, *, static_shapes: bool = False) -> RowKernels:
    """Compile the passes when they first run; arguments as of
    :func:`nxdt_core.engine.compile.compile_layers`."""
    dynamic = False if static_shapes else None
    compiled = functools.partial(one_graph, dynamic=dynamic, backend=backend)
    sums = compiled(_sums)
    # Logits require gradients in training and not in validation: that would be two graphs.
    return RowKernels(lambda rows, columns, dtype: sums(rows.detach(), columns, dtype), compiled(_gradients))


def _sums(rows: torch.Tensor, columns: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Written as inductor's pass for an online softmax looks for it: a Triton kernel then reads rows once.

    ``torch.logsumexp`` replaces infinite maxima between the two reductions, so that the pass does not find it.
    """
    values = rows.to(dtype)
    largest = values.amax(1, keepdim=True)
    total = (values - largest).exp().sum(1, keepdim=True)
    return (total.log() + largest).squeeze(1), values.gather(1, columns[:, None]).squeeze(1)


def _gradients(
    rows: torch.Tensor,
    columns: torch.Tensor,
    log_sums: torch.Tensor,
    hits: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    probabilities = (rows - log_sums[:, None]).exp()  # in the dtype of log_sums
    hit = torch.arange(rows.shape[1], device=rows.device) == columns[:, None]
    out.copy_((probabilities + torch.where(hit, hits[:, None], 0)) * scale[:, None])
    return out


def vocabulary_parallel_cross_entropies(
    logits: torch.Tensor, labels: torch.Tensor | None, kernels: RowKernels = IN_CHUNKS
) -> torch.Tensor:
    """Return :func:`nxdt_core.models.loss.cross_entropies`, equal on all ranks; without ``labels``
    :func:`nxdt_core.models.loss.log_partition`.

    Args:
        logits: [..., vocab], a DTensor with ``Shard(-1)`` on a one-dimensional mesh, cut evenly; whole logits (a plain
            tensor) take the loss for those.
        labels: int64 [...], whole; −100 takes no part.
        kernels: the passes over rows of logits.
    """
    if not is_dtensor(logits):
        return whole_vocabulary_cross_entropies(logits, labels, kernels)
    mesh, placements = logits.device_mesh, logits.placements
    if len(placements) != 1 or not placements[0].is_shard(logits.ndim - 1):
        raise ValueError(f"logits must be sharded by vocabulary on one mesh dimension, not {placements}")
    local: torch.Tensor = logits.to_local()
    rows = local.reshape(-1, local.shape[-1])
    group = mesh.get_group()
    if labels is None:  # the target of each row is on no rank
        columns = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        elsewhere = torch.ones_like(columns, dtype=torch.bool)
    else:
        columns, elsewhere = local_vocab_rows(target_ids(labels), rows.shape[1], group)
    hits = torch.where(elsewhere, 0.0, -1.0).to(torch.promote_types(rows.dtype, torch.float32))
    whole_rows = functools.partial(combine_vocab_shards, elsewhere=elsewhere, group=group)
    return row_cross_entropies(rows, columns, kernels, hits=hits, combine=whole_rows).view(logits.shape[:-1])


def combine_vocab_shards(
    sums: torch.Tensor, at: torch.Tensor, elsewhere: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp and target's logit of whole rows from those of each rank's part. Collective.

    Args:
        sums: log-sum-exp of this rank's part, [rows].
        at: the element in the target's column, of which the value matters where ``elsewhere`` is false.
        elsewhere: where the target is in another rank's part.
        group: the ranks that share the vocabulary.
    """
    parts = torch.stack((sums, at.masked_fill(elsewhere, 0)))
    of_ranks = parts.new_empty((group.size() * 2, len(sums)))
    all_gather_single(of_ranks, parts, group=group)
    return torch.logsumexp(of_ranks[0::2], dim=0), of_ranks[1::2].sum(dim=0)
