"""The one shape of training data: a ``Sample`` from a dataset, a ``Batch`` of samples for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["IGNORE_INDEX", "LARGEST", "Batch", "Sample"]

IGNORE_INDEX = -100
"""Label of a position that takes no part in the loss (the convention of ``torch.nn.functional.cross_entropy``)."""

LARGEST = 1e30
"""Magnitude that numbers of configurations, weights, margins and rewards have at most: float32 holds sums of many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence as a dataset yields it; arrays of one length [seq], int64 unless said.

    ``labels`` are already shifted: ``labels[i]`` is the token that follows ``input_ids[i]``, or −100. Sequences that
    belong together, such as the two answers of a preference, are one sample of several rows, [rows, seq]: no shuffling
    and no layout comes between them, and a batch has them as adjacent rows.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    loss_weights: np.ndarray | None = None
    """float32 [seq]; None means 1 where ``labels`` is not −100."""
    position_ids: np.ndarray | None = None
    """Positions of the tokens. None means 0, 1, 2, …; packed documents restart at 0."""
    document_ids: np.ndarray | None = None
    """Document of each token. None means one document; packed documents are numbered from 0, padding is −1."""
    padding: np.ndarray | None = None
    """bool [seq]: positions that hold no token; None means those whose document is −1."""
    reference_log_probs: np.ndarray | None = None
    """float32 [seq]: log-probability of each label under the model that the run began with; 0 where it is not needed.
    None where it is not requested."""
    origin: Any = None
    """Part of the record that a generating objective needs; it stays on the host."""
    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    """float32 [seq]: what else an objective wants of each position, by its own names, such as KTO's labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch; tensors [micro_batch, seq], or [micro_batch × rows, seq] of samples that have several rows."""

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
    padding: torch.Tensor | None = None
    """bool: positions that hold no token, which routers of experts leave out; None means those whose document is −1."""
    reference_log_probs: torch.Tensor | None = None
    """float32: of each label under the model that the run began with; None where it is not requested."""
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """float32: :attr:`Sample.values`; 0 in samples that lack one."""
    origins: tuple[Any, ...] = ()
    """:attr:`Sample.origin` of each sample; empty where the dataset sets none."""
    rows_per_sample: int = 1
    """Adjacent rows that are one sample."""
    first_row: int | None = None
    """Number of its first row in the global batch, once an engine runs it; dropout masks follow from it."""

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """Copy to ``device``; returns a batch of the same fields."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return a batch whose tensors are those that ``change`` makes of this one's."""
        changed: dict[str, Any] = {"values": {name: change(tensor) for name, tensor in self.values.items()}}
        for item in fields(self):
            if item.name != "values":
                value = getattr(self, item.name)
                changed[item.name] = value if isinstance(value, int | tuple | None) else change(value)
        return Batch(**changed)

    def arguments(self) -> dict[str, Any]:
        """Return what a model's forward takes in addition to its first argument, by keyword."""
        return {"position_ids": self.position_ids, "document_ids": self.document_ids}

    @property
    def samples(self) -> int:
        """Samples of the dataset that it holds, blank ones included."""
        return self.input_ids.shape[0] // self.rows_per_sample

    def padding_mask(self) -> torch.Tensor | None:
        """Return which positions hold no token, bool; None where all hold one."""
        if self.padding is None and self.document_ids is not None:
            return self.document_ids < 0
        return self.padding

    def tokens(self) -> torch.Tensor:
        """Return the number of positions that hold a token. Scalar, float32."""
        padding = self.padding_mask()
        return (self.input_ids.new_full((), self.input_ids.numel()) if padding is None else (~padding).sum()).float()

    def weight(self) -> torch.Tensor:
        """Return the sum of the loss weights: the number of loss tokens where they are all 1. Scalar, float32."""
        if self.loss_weights is not None:
            return (self.loss_weights * (self.labels != IGNORE_INDEX)).sum()
        return (self.labels != IGNORE_INDEX).sum().float()
