"""Experts over the ranks of ``ep``, each perhaps a part over those of ``tp``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from nxdt_core.distributed.expert_dispatch import ExchangingDispatcher
from nxdt_core.nn.autocast import compute_dtype
from nxdt_core.parallel.tensor.layers import sum_over_ranks

__all__ = ["AllToAllDispatcher"]


class AllToAllDispatcher(ExchangingDispatcher):
    """Experts in consecutive equal parts over the ranks of a group, each perhaps a part over tensor parallel ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        tensor_group: dist.ProcessGroup | None = None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        """``group``: over ``ep``; ``tensor_group``: over ``tp``, whose ranks hold parts of each expert. None for one
        rank. ``sequence_parallel``: hand on this rank's part of the sequence only."""
        super().__init__(group)
        self.tensor_group = tensor_group
        self.sequence_parallel = sequence_parallel

    def finish(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return the sum of what the tensor parallel ranks computed, whole or this rank's part of the sequence."""
        if self.tensor_group is None:
            return mixed
        narrow = mixed.to(compute_dtype(mixed))  # as the product of a matrix that the ranks share
        return sum_over_ranks(narrow, self.tensor_group, sequence_parallel=self.sequence_parallel).to(mixed.dtype)
