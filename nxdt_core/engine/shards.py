"""Position of a parameter in its whole, for optimizers."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from nxdt_core.distributed.placement import piece_of
from nxdt_core.engine.tensor.padding import PaddedDim, real_part
from nxdt_core.models.patterns import matches_any
from nxdt_core.protocols.optimizer import ParameterShard
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["shard_of", "tables"]


def shard_of(parameter: nn.Parameter, padded: PaddedDim | None, *, matrix: bool) -> ParameterShard:
    """Return the shard that this rank holds.

    Args:
        parameter: DTensor where it is cut.
        padded: where its zeros are, which no optimizer counts.
        matrix: whether it is one of a hidden layer.
    """
    piece = piece_of(parameter) if padded is None else real_part(parameter, padded)
    groups: tuple[dist.ProcessGroup, ...] = ()
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        groups = tuple(
            mesh.get_group(dim)
            for dim, placement in enumerate(parameter.placements)
            if not isinstance(placement, Replicate) and mesh.size(dim) > 1
        )
    return ParameterShard(shape=piece.shape, box=piece.box, groups=groups, matrix=matrix and len(piece.shape) >= 2)


def tables(modules: Iterable[nn.Module], plan: ParallelPlan) -> frozenset[str]:
    """Return the names of embeddings and output heads: matrices whose rows are looked up or are classes, one by one."""
    vocabulary = [pattern for pattern, style in plan.tensor.items() if style in ("vocab_embedding", "vocab_head")]
    found = {
        f"{path}.{leaf}" if path else leaf
        for module in modules
        for path, part in module.named_modules()
        if isinstance(part, nn.Embedding) or matches_any(vocabulary, path)
        for leaf, _ in part.named_parameters(recurse=False)
    }
    return frozenset(found | {owner for owner, user in plan.tied if user in found})
