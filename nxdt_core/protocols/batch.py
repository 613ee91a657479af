"""The one shape of training data: a ``Sample`` from a dataset, a ``Batch`` of samples for a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["IGNORE_INDEX", "Batch", "Sample"]

IGNORE_INDEX = -100
"""Label of a position that takes no part in the loss (the convention of ``torch.nn.functional.cross_entropy``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence as a dataset yields it; arrays of one length [seq], int64 unless said.

    ``labels`` are already shifted: ``labels[i]`` is the token that follows ``input_ids[i]``, or −100.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    loss_weights: np.ndarray | None = None
    """float32 [seq]; None means 1 where ``labels`` is not −100."""
    position_ids: np.ndarray | None = None
    """None means 0, 1, 2, …; packed documents restart at 0."""
    document_ids: np.ndarray | None = None
    """None means one document; packed documents are numbered from 0, padding is −1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch; tensors [micro_batch, seq]."""

    input_ids: torch.Tensor
    """int64"""
    labels: torch.Tensor
    """int64, shifted by the dataset or collation; −100 is ignored. No model shifts again."""
    loss_weights: torch.Tensor | None = None
    """float32; None means 1 where ``labels`` is not −100 and 0 elsewhere."""
    position_ids: torch.Tensor | None = None
    """int64; None means 0 … seq−1."""
    document_ids: torch.Tensor | None = None
    """int64; None means that each row is one document."""

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """Copy to ``device``; returns a batch of the same fields."""

        def moved(value: torch.Tensor | None) -> torch.Tensor | None:
            return None if value is None else value.to(device, non_blocking=non_blocking)

        return Batch(
            input_ids=self.input_ids.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            loss_weights=moved(self.loss_weights),
            position_ids=moved(self.position_ids),
            document_ids=moved(self.document_ids),
        )

    def weight(self) -> torch.Tensor:
        """Sum of the loss weights: the number of loss tokens where they are all 1. Scalar, float32."""
        if self.loss_weights is not None:
            return (self.loss_weights * (self.labels != IGNORE_INDEX)).sum()
        return (self.labels != IGNORE_INDEX).sum().float()
