"""Cross-entropy of logits that are cut by vocabulary: no rank ever holds a whole row of them.

Every row needs two numbers of each rank, its own log-sum-exp and the target's logit if it has it: one small
all-gather forward, nothing backward.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nxdt_core.models.loss.cross_entropy import row_weights, whole_vocabulary_cross_entropies
from nxdt_core.models.loss.logit_rows import IN_CHUNKS, RowKernels, row_cross_entropies
from nxdt_core.torch_versions import all_gather_single

__all__ = ["vocabulary_parallel_cross_entropies"]


def vocabulary_parallel_cross_entropies(
    logits: torch.Tensor, labels: torch.Tensor | None, kernels: RowKernels = IN_CHUNKS
) -> torch.Tensor:
    """Return :func:`nxdt_core.models.loss.cross_entropy.cross_entropies`, equal on all ranks; without ``labels``
    :func:`nxdt_core.models.loss.cross_entropy.log_partition`.

    Args:
        logits: [..., vocab], a DTensor with ``Shard(-1)`` on a one-dimensional mesh, cut evenly; whole logits (a plain
            tensor) take the loss for those.
        labels: int64 [...], whole; −100 takes no part.
        kernels: the passes over rows of logits.
    """
    if not isinstance(logits, DTensor):
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
        columns, elsewhere = rows_here(row_weights(rows, labels, None)[1], rows.shape[1], group)
    hits = torch.where(elsewhere, 0.0, -1.0).to(torch.promote_types(rows.dtype, torch.float32))
    whole_rows = functools.partial(over_ranks, elsewhere=elsewhere, group=group)
    return row_cross_entropies(rows, columns, kernels, hits=hits, combine=whole_rows).view(logits.shape[:-1])


def over_ranks(
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


def rows_here(ids: torch.Tensor, rows: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of the vocabulary as row numbers of this rank's part, which has ``rows`` rows.

    Returns:
        Row numbers, 0 for ids on other ranks, and a mask of those. Ids on no rank stay out of range,
        so that the lookup fails on them.
    """
    local = ids - group.rank() * rows
    elsewhere = (local < 0) | (local >= rows)
    exists = (ids >= 0) & (ids < group.size() * rows)
    return local.masked_fill(elsewhere & exists, 0), elsewhere
