"""Embedding table and output projection cut by vocabulary row over tensor-parallel ranks.

Paths and parameter names are those of the ``torch.nn`` modules that they replace.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from nxdt_core.engine.tensor.layers import local_part, sum_over_ranks
from nxdt_core.engine.vocabulary_loss import rows_here
from nxdt_core.errors.launch import SequenceDoesNotDivide
from nxdt_core.models.updates import updated_linear

__all__ = ["SequenceEmbedding", "VocabularyEmbedding", "VocabularyHead"]


class VocabularyEmbedding(nn.Module):
    """Each rank looks up the ids in its part of the table, zero for all others; the sum over ranks is the embedding."""

    def __init__(
        self,
        weight: nn.Parameter,
        group: dist.ProcessGroup,
        *,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        update: nn.Module | None = None,
    ) -> None:
        """``weight`` [vocab, hidden]: a DTensor with ``Shard(0)``, cut evenly; ``update`` likewise."""
        super().__init__()
        self.weight = weight
        self.update = update
        self.group = group
        self.padding_idx = padding_idx
        self.sequence_parallel = sequence_parallel

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [batch, seq] to [batch, seq, hidden], or to [batch, seq / tp, hidden] under sequence parallelism.

        Raises:
            IndexError: an id outside of the vocabulary (a device-side failure on accelerators), as ``nn.Embedding``.
            SequenceDoesNotDivide: under sequence parallelism.
        """
        if self.sequence_parallel:
            check_sequence(ids.shape[-1], self.group)
        table = local_part(self.weight)
        rows, elsewhere = rows_here(ids, len(table), self.group)
        padding = None if self.padding_idx is None else self.padding_idx - self.group.rank() * len(table)
        if padding is not None and not 0 <= padding < len(table):
            padding = None
        found = functional.embedding(rows, table, padding_idx=padding)
        if self.update is not None:
            found = self.update(rows, found, table)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
        return sum_over_ranks(found, self.group, sequence_parallel=self.sequence_parallel)


class SequenceEmbedding(nn.Module):
    """A whole table, such as learned positions, that looks up this rank's part of the sequence."""

    def __init__(
        self,
        weight: torch.Tensor,
        group: dist.ProcessGroup,
        *,
        padding_idx: int | None = None,
        update: nn.Module | None = None,
    ) -> None:
        """``weight`` [rows, hidden]: a parameter, whole on each rank, as ``update`` is."""
        super().__init__()
        self.weight = weight
        self.update = update
        self.group = group
        self.padding_idx = padding_idx

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [..., seq] to [..., seq / tp, hidden]."""
        length = check_sequence(ids.shape[-1], self.group)
        part = ids.narrow(-1, self.group.rank() * length, length)
        found = functional.embedding(part, self.weight, padding_idx=self.padding_idx)
        return found if self.update is None else self.update(part, found, self.weight)


class VocabularyHead(nn.Module):
    """Each rank computes the logits of its part of the vocabulary, from whole hidden states."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, mesh: DeviceMesh, *, update: nn.Module | None = None
    ) -> None:
        """``weight`` [vocab, hidden] and ``bias`` [vocab]: DTensors with ``Shard(0)`` on ``mesh``; ``update``
        likewise."""
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.update = update
        self.mesh = mesh

    def forward(self, hidden: torch.Tensor) -> DTensor:
        """[..., hidden] to logits [..., vocab], a DTensor with ``Shard(-1)``: an objective that takes them for whole
        fails instead of being wrong silently."""
        bias = None if self.bias is None else local_part(self.bias)
        logits = updated_linear(hidden, local_part(self.weight), bias, self.update)
        return DTensor.from_local(logits, self.mesh, [Shard(-1)], run_check=False)


def check_sequence(length: int, group: dist.ProcessGroup) -> int:
    """Positions of a sequence on each rank under sequence parallelism."""
    if length % group.size():
        raise SequenceDoesNotDivide(length=length, ranks=group.size())
    return length // group.size()
