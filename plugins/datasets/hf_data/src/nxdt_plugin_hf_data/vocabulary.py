"""Tokens that the model has no row for are reported before they reach it, with their place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.files.paths import WatchedFiles
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_core.protocols.dataset import MapDataset
from nxdt_plugin_hf_data.columns import TokenColumns
from nxdt_plugin_hf_data.errors import TokenOutOfVocabulary

__all__ = ["Guarded", "check_columns", "check_ids"]


class Guarded:
    """The samples of ``dataset``, each looked at when it is read; those at both ends and some between at once.

    Args:
        dataset: whose samples these are.
        vocab_size: rows of the model's vocabulary; None where they are not known.
        path: names the dataset in errors.
        labelled: whether labels are others than the tokens that follow.
        files: in which the samples are mapped.

    Raises:
        TokenOutOfVocabulary: a sample holds a token from there on, or a negative one.
        DataFileChanged: a file has become shorter.
    """

    def __init__(
        self, dataset: MapDataset, vocab_size: int | None, path: str, *, labelled: bool, files: WatchedFiles
    ) -> None:
        self._dataset = dataset
        self._limit = vocab_size
        self._path = path
        self._labelled = labelled
        self._files = files
        if vocab_size is not None and len(dataset):
            for index in np.linspace(0, len(dataset) - 1, _PROBES, dtype=np.int64).tolist():
                self[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int, /) -> Sample:
        self._files.check()
        sample = self._dataset[index]
        labels = sample.labels if self._labelled else sample.labels[-1:]  # the others are inputs, one place on
        for ids in (sample.input_ids, np.where(labels == IGNORE_INDEX, 0, labels)):
            check_ids(ids, self._limit, lambda: f"Sample {index} of {self._path}")
        return sample

    def fingerprint(self) -> str:
        """Return the fingerprint of the dataset."""
        return self._dataset.fingerprint()


_PROBES = 16


def check_ids(ids: NDArray[np.integer], limit: int | None, place: Callable[[], str]) -> None:
    """Check that all ``ids`` are from 0 to ``limit`` - 1.

    Raises:
        TokenOutOfVocabulary: one is not; ``place`` returns its location.
    """
    if limit is None or not len(ids):
        return
    lowest, highest = int(ids.min()), int(ids.max())
    if highest >= limit or lowest < 0:
        raise TokenOutOfVocabulary(place=place(), token=highest if highest >= limit else lowest, vocab_size=limit)


def check_columns(columns: TokenColumns, limit: int | None, place: Callable[[], str]) -> None:
    """See to the tokens, and to the labels of those that are learnt, as :func:`check_ids` does."""
    check_ids(columns.input_ids.values[:], limit, place)
    if columns.labels is not None:
        check_ids(columns.labels.values[:][columns.learnt(0, len(columns.input_ids))], limit, place)
