"""Samples with the log-probabilities that another model gives their labels: computed before, kept by sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.digest import digest
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_core.protocols.dataset import MapDataset

__all__ = ["LogProbs", "Referenced", "weighted_labels"]


class LogProbs:
    """Log-probabilities of the labels that count, of every sample of a dataset.

    Args:
        values: float32, of sample after sample.
        counts: how many of each sample.
    """

    def __init__(self, values: NDArray[np.float32], counts: NDArray[np.int64]) -> None:
        self.values, self.counts = values, counts
        self._ends = np.cumsum(counts)

    @classmethod
    def gather(cls, by_sample: Mapping[int, NDArray[np.float32]]) -> LogProbs:
        """Join the log-probabilities of all samples, given by number."""
        parts = [by_sample[index] for index in range(len(by_sample))]
        return cls(np.concatenate(parts), np.array([len(part) for part in parts], dtype=np.int64))

    def of(self, index: int) -> NDArray[np.float32]:
        """Return the log-probabilities [seq] of one sample."""
        end = self._ends[index]
        return self.values[end - self.counts[index] : end]


class Referenced:
    """A dataset whose samples have ``reference_log_probs``.

    Args:
        dataset: the samples.
        log_probs: of their labels.
        model: digest of what the log-probabilities were computed with.
    """

    def __init__(self, dataset: MapDataset, log_probs: LogProbs, *, model: str) -> None:
        self._dataset = dataset
        self._log_probs = log_probs
        self._model = model

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int, /) -> Sample:
        sample = self._dataset[index]
        values = np.zeros(sample.labels.shape, dtype=np.float32)
        values[weighted_labels(sample)] = self._log_probs.of(index)
        return replace(sample, reference_log_probs=values)

    def fingerprint(self) -> str:
        """Return a digest of the dataset's fingerprint and of the reference model."""
        return digest("referenced", self._dataset.fingerprint(), self._model)


def weighted_labels(sample: Sample) -> NDArray[np.bool_]:
    """Return which labels of a sample count in the loss."""
    labelled: NDArray[np.bool_] = sample.labels != IGNORE_INDEX
    return labelled if sample.loss_weights is None else np.logical_and(labelled, sample.loss_weights > 0)
