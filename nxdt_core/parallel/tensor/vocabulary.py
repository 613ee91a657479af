"""Cross-entropy of logits that are cut by vocabulary: no rank ever holds a whole row of them.

Every row needs two numbers of each rank, its own log-sum-exp and the target's logit if it has it: one small
all-gather forward, nothing backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nxdt_core.nn.loss import row_gradients, row_sums, row_weights, whole_vocabulary_cross_entropies
from nxdt_core.parallel.tensor.vocabulary_layers import rows_here
from nxdt_core.torch_versions import all_gather_single

__all__ = ["over_ranks", "vocabulary_parallel_cross_entropies"]


def vocabulary_parallel_cross_entropies(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As :func:`nxdt_core.nn.loss.cross_entropies`, and equal on all ranks.

    Args:
        logits: [..., vocab], a DTensor with ``Shard(-1)`` on a one-dimensional mesh, cut evenly; whole logits (a plain
            tensor) take the loss for those.
        labels: int64 [...], whole; −100 takes no part.
    """
    if not isinstance(logits, DTensor):
        return whole_vocabulary_cross_entropies(logits, labels)
    mesh, placements = logits.device_mesh, logits.placements
    if len(placements) != 1 or not placements[0].is_shard(logits.ndim - 1):
        raise ValueError(f"logits must be sharded by vocabulary on one mesh dimension, not {placements}")
    local: torch.Tensor = logits.to_local()
    rows = local.reshape(-1, local.shape[-1])
    _, targets = row_weights(rows, labels, None)
    losses: torch.Tensor = _CrossEntropies.apply(rows, targets, mesh.get_group())  # type: ignore[no-untyped-call]
    return losses.view(labels.shape)


class _CrossEntropies(torch.autograd.Function):
    """As the function of that name for whole rows; the same chunks, so the same bound on memory."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        columns, elsewhere = rows_here(targets, rows.shape[1], group)
        dtype = torch.promote_types(rows.dtype, torch.float32)
        log_sums, at_target = over_ranks(*row_sums(rows, columns, dtype), elsewhere, group)
        ctx.save_for_backward(rows, columns, elsewhere, log_sums)
        return log_sums - at_target

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        rows, columns, elsewhere, log_sums = ctx.saved_tensors
        hits = torch.where(elsewhere, 0.0, -1.0).to(log_sums.dtype)
        return row_gradients(rows, columns, log_sums, hits, grad, torch.empty_like(rows)), None, None


def over_ranks(
    sums: torch.Tensor, at: torch.Tensor, elsewhere: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp and target's logit of whole rows from those of each rank's part. Collective.

    Args:
        sums: log-sum-exp of this rank's part, [rows].
        at: the element in the target's column, of which the value matters where ``elsewhere`` is false.
        elsewhere: where the target lies in another rank's part.
        group: the ranks that share the vocabulary.
    """
    parts = torch.stack((sums, at.masked_fill(elsewhere, 0)))
    of_ranks = parts.new_empty((group.size() * 2, len(sums)))
    all_gather_single(of_ranks, parts, group=group)
    return torch.logsumexp(of_ranks[0::2], dim=0), of_ranks[1::2].sum(dim=0)
