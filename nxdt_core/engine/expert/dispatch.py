"""Experts over the ranks of ``ep``, each perhaps a part over those of ``tp``.

Tensor parallel ranks route the same tokens. Each may send them whole to its peers of ``ep``, or a slice of their
features: the peers then put the slices together. Slices send less over ``ep`` and more over ``tp``, which pays where
the ranks of ``ep`` are on several machines.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import nn

from nxdt_core.distributed.collectives import all_to_all, gather_along, gather_whole, scatter_sum_along
from nxdt_core.engine.expert_dispatch import ExchangingDispatcher
from nxdt_core.engine.tensor.gathered_again import gathers_ahead
from nxdt_core.engine.tensor.layers import sum_over_ranks
from nxdt_core.models.autocast import compute_dtype
from nxdt_core.models.moe.experts import RowGroups
from nxdt_core.models.moe.router import Routing

__all__ = ["AllToAllDispatcher", "Sliced"]

Sliced = Literal["none", "capacity", "all"]
"""Which rows are sent in slices; ``capacity``: those of experts with a capacity. Torch 2.13 cannot compile the backward
of others, whose number depends on data and which are gathered."""


class AllToAllDispatcher(ExchangingDispatcher):
    """Experts in consecutive equal parts over the ranks of a group, each perhaps a part over tensor parallel ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        tensor_group: dist.ProcessGroup | None = None,
        *,
        sequence_parallel: bool = False,
        sliced: Sliced = "none",
        chunks: int = 1,
    ) -> None:
        """``group``: over ``ep``; ``tensor_group``: over ``tp``, whose ranks hold parts of each expert. None for one
        rank. ``sequence_parallel``: hand on this rank's part of the sequence only. ``sliced``: which rows are sent in
        slices. ``chunks``: as of :class:`~nxdt_core.engine.expert_dispatch.ExchangingDispatcher`."""
        super().__init__(group, chunks)
        self.tensor_group = tensor_group
        self.sequence_parallel = sequence_parallel
        self.sliced = sliced

    def forward(self, hidden: torch.Tensor, routing: Routing, experts: nn.Module) -> torch.Tensor:
        """Compute :meth:`LocalDispatcher.forward`, over the ranks of both groups."""
        tensor_group = self.tensor_group
        sliced = self.sliced == "all" or (self.sliced == "capacity" and routing.capacity is not None)
        if not sliced or tensor_group is None or hidden.shape[-1] % tensor_group.size():
            return super().forward(hidden, routing, experts)
        width = hidden.shape[-1] // tensor_group.size()

        def of_slices(rows: torch.Tensor, *groups: RowGroups) -> torch.Tensor:
            partial = experts(gather_along(rows, -1, tensor_group), *groups)
            return scatter_sum_along(partial, -1, tensor_group)

        own = hidden.narrow(-1, tensor_group.rank() * width, width)
        mixed = self.mixed(own.flatten(0, 1), routing, cast(nn.Module, of_slices)).view_as(own)
        narrow = mixed.to(compute_dtype(mixed))
        whole = _by_sequence(narrow, tensor_group) if self.sequence_parallel else gather_whole(narrow, -1, tensor_group)
        return whole.to(mixed.dtype)

    def finish(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return the sum of what the tensor parallel ranks computed, whole or this rank's part of the sequence."""
        if self.tensor_group is None:
            return mixed
        narrow = mixed.to(compute_dtype(mixed))  # as the product of a matrix that the ranks share
        gathers_ahead(self, narrow)
        return sum_over_ranks(narrow, self.tensor_group, sequence_parallel=self.sequence_parallel).to(mixed.dtype)


def _by_sequence(slices: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of the sequence with all features [batch, seq / n, n * width], of its slice of the features
    of the whole sequence [batch, seq, width]."""
    ranks, (batch, seq, width) = group.size(), slices.shape
    parts = slices.view(batch, ranks, -1, width).transpose(0, 1)  # [ranks, batch, seq / ranks, width]
    splits = [batch * seq // ranks] * ranks
    arrived = all_to_all(parts.flatten(0, 2), splits, splits, group, equal=True)
    return arrived.view(ranks, batch, -1, width).permute(1, 2, 0, 3).flatten(2)
