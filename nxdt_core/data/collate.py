"""Samples of numpy arrays → one batch of torch tensors. No padding: a dataset yields samples of one length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nxdt_core.errors.data import EmptyDataset, MixedSamples
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch, Sample

__all__ = ["blank_like", "collate", "count_loss_tokens"]


def collate(samples: Sequence[Sample]) -> Batch:
    """Stack samples into tensors [len(samples), seq]; those of several rows [len(samples) × rows, seq].

    An optional field that only some samples have is filled with what its absence means, so that a batch is the
    same whichever samples it is made of. Labels stay as the dataset shifted them.

    Raises:
        MixedSamples: the samples differ in length.
        EmptyDataset: there are no samples.
    """
    if not samples:
        raise EmptyDataset()
    shapes = [sample.input_ids.shape for sample in samples]
    if min(shapes) != max(shapes):
        raise MixedSamples(lengths=tuple(shape[-1] for shape in shapes))
    optional = {name: _optional(samples, name, dtype, absent) for name, (dtype, absent) in _OPTIONAL.items()}
    return Batch(
        input_ids=_stack([sample.input_ids for sample in samples], np.int64),
        labels=_stack([sample.labels for sample in samples], np.int64),
        **optional,
        rows_per_sample=1 if len(shapes[0]) == 1 else shapes[0][0],
    )


def blank_like(sample: Sample) -> Sample:
    """Return a sample of the same shape that takes no part in the loss; fills up the last batch of a pass."""
    return replace(
        sample,
        labels=np.full_like(sample.labels, IGNORE_INDEX),
        loss_weights=None if sample.loss_weights is None else np.zeros_like(sample.loss_weights),
    )


def count_loss_tokens(batches: Iterable[Batch]) -> int:
    """Return the number of positions of these micro-batches whose label counts, with any weight."""
    return sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)


_OPTIONAL: Mapping[str, tuple[type[np.generic], Callable[[Sample], np.ndarray]]] = {
    "loss_weights": (np.float32, lambda sample: sample.labels != IGNORE_INDEX),
    "position_ids": (
        np.int64,
        lambda sample: np.broadcast_to(np.arange(sample.labels.shape[-1]), sample.labels.shape),
    ),
    "document_ids": (np.int64, lambda sample: np.zeros_like(sample.labels)),
    "reference_log_probs": (np.float32, lambda sample: np.zeros(sample.labels.shape, np.float32)),
}
"""By field: its dtype, and what its absence means."""


def _optional(
    samples: Sequence[Sample], name: str, dtype: type[np.generic], absent: Callable[[Sample], np.ndarray]
) -> Any:
    values = [getattr(sample, name) for sample in samples]
    if all(value is None for value in values):
        return None
    filled = [absent(sample) if value is None else value for sample, value in zip(samples, values, strict=True)]
    return _stack(filled, dtype)


def _stack(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> torch.Tensor:
    """[len(arrays) × rows, seq]"""
    out = np.empty((len(arrays), *arrays[0].shape), dtype)
    for part, array in zip(out, arrays, strict=True):
        part[:] = array
    return torch.from_numpy(out.reshape(-1, out.shape[-1]))
