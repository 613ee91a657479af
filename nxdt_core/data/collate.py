"""Samples of numpy arrays → one batch of torch tensors. No padding: a dataset yields samples of one length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from nxdt_core.errors import EmptyDataset, MixedSamples
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch, Sample

__all__ = ["blank_like", "collate", "count_loss_tokens"]


def collate(samples: Sequence[Sample]) -> Batch:
    """Stack samples into tensors [len(samples), seq].

    An optional field that only some samples have is filled with what its absence means, so that a batch is the
    same whichever samples it is made of. Labels stay as the dataset shifted them.

    Raises:
        MixedSamples: the samples differ in length.
        EmptyDataset: there are no samples.
    """
    if not samples:
        raise EmptyDataset()
    lengths = [sample.input_ids.shape[0] for sample in samples]
    if min(lengths) != max(lengths):
        raise MixedSamples(lengths=tuple(lengths))
    labels = _stack([sample.labels for sample in samples], np.int64)
    return Batch(
        input_ids=_stack([sample.input_ids for sample in samples], np.int64),
        labels=labels,
        loss_weights=_weights(samples, labels),
        position_ids=_positions(samples, lengths[0]),
        document_ids=_documents(samples, lengths[0]),
    )


def blank_like(sample: Sample) -> Sample:
    """A sample of the same shape that takes no part in the loss; fills up the last batch of a pass."""
    return Sample(
        input_ids=sample.input_ids,
        labels=np.full_like(sample.labels, IGNORE_INDEX),
        loss_weights=None if sample.loss_weights is None else np.zeros_like(sample.loss_weights),
        position_ids=sample.position_ids,
        document_ids=sample.document_ids,
    )


def count_loss_tokens(batches: Iterable[Batch]) -> int:
    """Number of positions of these micro-batches whose label counts, whatever their weight."""
    return sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)


def _stack(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> torch.Tensor:
    out = np.empty((len(arrays), *arrays[0].shape), dtype)
    for row, array in zip(out, arrays, strict=True):
        row[:] = array
    return torch.from_numpy(out)


def _weights(samples: Sequence[Sample], labels: torch.Tensor) -> torch.Tensor | None:
    if all(sample.loss_weights is None for sample in samples):
        return None
    weights = (labels != IGNORE_INDEX).float()
    for row, sample in zip(weights, samples, strict=True):
        if sample.loss_weights is not None:
            row.copy_(torch.from_numpy(np.ascontiguousarray(sample.loss_weights)))
    return weights


def _positions(samples: Sequence[Sample], length: int) -> torch.Tensor | None:
    if all(sample.position_ids is None for sample in samples):
        return None
    default = np.arange(length, dtype=np.int64)
    return _stack([default if s.position_ids is None else s.position_ids for s in samples], np.int64)


def _documents(samples: Sequence[Sample], length: int) -> torch.Tensor | None:
    if all(sample.document_ids is None for sample in samples):
        return None
    default = np.zeros(length, dtype=np.int64)
    return _stack([default if s.document_ids is None else s.document_ids for s in samples], np.int64)
