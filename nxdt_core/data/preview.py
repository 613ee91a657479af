"""A preview of a run's training data, for people to look at: samples as documents of trained and untrained text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, pairwise

import numpy as np
from numpy.typing import NDArray

from nxdt_core.data.sampler import GlobalOrder
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_core.protocols.dataset import DataReport, IterableDataset, MapDataset, TokenCount
from nxdt_core.protocols.tokenizer import Tokenizer

_COUNTED = 256
"""Samples that are counted where a dataset does not report of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Adjacent tokens of a document, all of which are trained or none."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    """Text of each token by itself; a character that several tokens share shows in none of them."""
    text: str
    """Text of all tokens; empty where there is no tokenizer."""
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownDocument:
    """A document, whose tokens attend to each other only."""

    parts: tuple[Part, ...]

    @property
    def count(self) -> TokenCount:
        """Return how many tokens the document has and how many are trained; the last may be a label only."""
        trained = sum(len(part.ids) for part in self.parts if part.trained)
        return TokenCount(tokens=sum(len(part.ids) for part in self.parts), trained=trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSample:
    """One row of a sample."""

    index: int
    """Index of the sample in the dataset; in an iterable one, its place from 0."""
    row: int
    documents: tuple[ShownDocument, ...]
    padding: int
    """Positions without a token."""
    length: int
    """Number of all positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The first samples of a run, and counts."""

    samples: int | None
    """Number of samples in the dataset; None where it does not know."""
    shown: tuple[ShownSample, ...]
    report: DataReport
    counted: int | None
    """Samples that the report is of; None: the dataset's own, of all its records."""


def preview(
    dataset: MapDataset | IterableDataset, tokenizer: Tokenizer | None, *, count: int, seed: int, shuffle: bool
) -> Preview:
    """Return the first ``count`` samples of a run in the order in which it takes them, and counts of all or of the
    first ones.

    Args:
        dataset: a split.
        tokenizer: writes the text; without one there are ids only.
        count: samples to show.
        seed, shuffle: of the run.
    """
    report = dataset.report()
    wanted = max(count, _COUNTED) if report is None else count
    if isinstance(dataset, MapDataset):
        order = GlobalOrder(len(dataset), seed=seed, shuffle=shuffle).indices(0, min(wanted, len(dataset))).tolist()
        samples = [(index, dataset[index]) for index in order]
    else:
        samples = list(enumerate(islice(dataset, wanted)))
    shown: list[ShownSample] = []
    lengths: list[int] = []
    trained = places = 0
    for number, (index, sample) in enumerate(samples):
        for row, one in enumerate(_rows(sample)):
            pieces, learnt = list(_pieces(one)), _learnt(one)
            sizes, length = [piece.stop - piece.start for piece in pieces], len(one.input_ids)
            lengths += sizes
            trained, places = trained + int(learnt.sum()), places + length
            if number < count:
                documents = [ShownDocument(parts=tuple(_parts(one, piece, learnt, tokenizer))) for piece in pieces]
                padding = length - sum(sizes)
                shown.append(
                    ShownSample(index=index, row=row, documents=tuple(documents), padding=padding, length=length)
                )
    counted = None
    if report is None:
        counted = len(samples)
        report = DataReport(
            records=len(lengths),
            tokens=TokenCount(tokens=sum(lengths), trained=trained),
            lengths=np.array(lengths, np.int64),
            efficiency=sum(lengths) / places if places else None,
        )
    size = len(dataset) if isinstance(dataset, MapDataset) else None
    return Preview(samples=size, shown=tuple(shown), report=report, counted=counted)


def _rows(sample: Sample) -> list[Sample]:
    """Return each row of a sample as a sample."""
    if sample.input_ids.ndim == 1:
        return [sample]
    fields = ("input_ids", "labels", "loss_weights", "document_ids")
    arrays = {name: array for name in fields if (array := getattr(sample, name)) is not None}
    return [Sample(**{name: array[row] for name, array in arrays.items()}) for row in range(len(sample.input_ids))]


def _pieces(row: Sample) -> Iterator[slice]:
    """The documents of a row, padding left out: a row of one document may end in one token over and over, unlearnt."""
    if row.document_ids is None:
        other = np.flatnonzero((row.input_ids != row.input_ids[-1]) | (row.labels != IGNORE_INDEX))
        last = int(other[-1]) + 1 if len(other) else len(row.input_ids)
        yield slice(0, last if last < len(row.input_ids) - 1 else len(row.input_ids))
        return
    borders = np.flatnonzero(np.diff(row.document_ids)) + 1
    edges = [0, *borders.tolist(), len(row.document_ids)]
    for begin, end in pairwise(edges):
        if row.document_ids[begin] >= 0:
            yield slice(begin, end)


def _learnt(row: Sample) -> NDArray[np.bool_]:
    """[seq] whether the loss is on what follows a position."""
    learnt: NDArray[np.bool_] = row.labels != IGNORE_INDEX
    return learnt if row.loss_weights is None else learnt & (row.loss_weights != 0)


def _parts(sample: Sample, piece: slice, learnt: NDArray[np.bool_], tokenizer: Tokenizer | None) -> Iterator[Part]:
    """A document's tokens in order: its first input, then what each position is followed by.

    That is the label where there is one, so that labels which are not shifted by one show as the nonsense they are.
    """
    inputs, labels, trained = sample.input_ids[piece], sample.labels[piece], learnt[piece]
    following = np.append(inputs[1:], labels[-1])
    ids = [int(inputs[0]), *np.where(trained, labels, following).tolist()]
    flags = [False, *trained.tolist()]
    if not trained[-1]:  # what follows the last position is unknown, or not part of the sample
        ids, flags = ids[:-1], flags[:-1]
    done, before = 0, ""
    for flag, run in groupby(flags):
        some = tuple(ids[done : done + sum(1 for _ in run)])
        done += len(some)
        whole = _spell(ids[:done], tokenizer)
        text = whole[len(before) :] if whole.startswith(before) else _spell(some, tokenizer)
        texts = tuple(_spell([id_], tokenizer) for id_ in some)
        before = whole
        yield Part(ids=some, texts=texts, text=text, trained=flag)


def _spell(ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    return "" if tokenizer is None else tokenizer.spell(ids)
