"""The two passes over rows of logits that cross-entropies take, which an engine may compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nxdt_core.distributed.devices import profile_of

__all__ = ["IN_CHUNKS", "RowKernels", "row_chunks", "row_cross_entropies"]

_CHUNK_ELEMENTS_IN_CACHE = 1 << 18
"""Logits in full precision at a time: 1 MiB of float32, which stays in a core's cache. Against ``F.cross_entropy``,
forward and backward took 0.64 of the time at 4,096 words and 0.43 at 32,000."""
_CHUNK_ELEMENTS = 1 << 26
"""Elsewhere, where each chunk costs five kernel launches: 256 MiB of float32."""


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


Combine = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


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
        columns: of the targets, [rows].
        kernels: the passes over the rows.
        hits: as for :class:`RowKernels`; None for −1 everywhere.
        combine: makes log-sum-exps and targets' logits of whole rows from those of these parts.
    """
    losses: torch.Tensor = _CrossEntropies.apply(rows, columns, kernels, hits, combine)  # type: ignore[no-untyped-call]
    return losses


class _CrossEntropies(torch.autograd.Function):
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


def row_chunks(rows: torch.Tensor) -> list[slice]:
    """Parts of ``rows`` [rows, columns] whose full-precision copies are small: in cache, or bounded in memory."""
    elements = _CHUNK_ELEMENTS_IN_CACHE if profile_of(rows.device).cache_bound_kernels else _CHUNK_ELEMENTS
    step = max(1, elements // rows.shape[1])
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
