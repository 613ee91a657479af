"""Datasets as a series of steps: the jobs that build one rank's part of each global batch, and samples as tensors.

The global batch of a step is the same in every layout; rank r of n takes its r-th of n equal slices. Where a
single pass ends within a global batch, every rank yields as many micro-batches as the fullest, and rows without a
sample are blank (see :func:`blank_like`), so that collectives of all ranks still meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nxdt_core.data.sampler import GlobalOrder
from nxdt_core.errors.data import EmptyDataset, MixedSamples
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch, Sample
from nxdt_core.protocols.dataset import IterableDataset, MapDataset

__all__ = [
    "Job",
    "MapSource",
    "Position",
    "Slicing",
    "Step",
    "StreamSource",
    "blank_like",
    "collate",
    "count_loss_tokens",
]


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
        values={name: _values(samples, name) for name in dict.fromkeys(n for item in samples for n in item.values)},
        rows_per_sample=1 if len(shapes[0]) == 1 else shapes[0][0],
        origins=tuple(origins) if any(origins := [sample.origin for sample in samples]) else (),
    )


def blank_like(sample: Sample) -> Sample:
    """Return a sample of the same shape that is all padding, without a loss; fills up the last batch of a pass."""
    return replace(
        sample,
        labels=np.full_like(sample.labels, IGNORE_INDEX),
        loss_weights=None if sample.loss_weights is None else np.zeros_like(sample.loss_weights),
        padding=np.ones(sample.labels.shape, np.bool_),
        origin=None,
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
    "padding": (
        np.bool_,
        lambda sample: np.zeros(sample.labels.shape) if sample.document_ids is None else sample.document_ids < 0,
    ),
    "reference_log_probs": (np.float32, lambda sample: np.zeros(sample.labels.shape, np.float32)),
}
"""Dtype of each field, and what its absence means."""


def _optional(
    samples: Sequence[Sample], name: str, dtype: type[np.generic], absent: Callable[[Sample], np.ndarray]
) -> Any:
    values = [getattr(sample, name) for sample in samples]
    if all(value is None for value in values):
        return None
    filled = [absent(sample) if value is None else value for sample, value in zip(samples, values, strict=True)]
    return _stack(filled, dtype)


def _values(samples: Sequence[Sample], name: str) -> torch.Tensor:
    """Return a value of each position; 0 where a sample has none of that name."""
    return _stack([sample.values.get(name, np.zeros(sample.labels.shape)) for sample in samples], np.float32)


def _stack(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> torch.Tensor:
    """[len(arrays) × rows, seq]"""
    out = np.empty((len(arrays), *arrays[0].shape), dtype)
    for part, array in zip(out, arrays, strict=True):
        part[:] = array
    return torch.from_numpy(out.reshape(-1, out.shape[-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place between two steps."""

    samples: int = 0
    """Samples of the global order before it."""
    stream: dict[str, Any] | None = None
    """State of an iterable dataset; None means its beginning. Always None for map-style data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One rank's part of a global batch, and the position after it."""

    batches: list[Batch]
    after: Position


Job = Callable[[], Step | None]
"""Builds a step; None where the data of a single pass ended before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """Division of a global batch into the micro-batches of one rank."""

    global_batch_size: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    repeat: bool
    drop_last: bool
    constant: bool = False
    """Every global batch has equally many micro-batches, also the last one of a single pass."""

    @property
    def mine(self) -> range:
        """Return this rank's places within a global batch."""
        per_rank = self.global_batch_size // self.dp_size
        return range(self.dp_rank * per_rank, (self.dp_rank + 1) * per_rank)

    def cut(self, samples: Sequence[Sample], template: Sample, found: int) -> list[Batch]:
        """Return the micro-batches of this rank's ``samples``, filled up with blanks made of ``template``.

        Args:
            samples: those of the ``found`` samples of the global batch at the positions :attr:`mine`.
            template: any sample of the global batch.
            found: samples in the global batch; fewer than its size only at the end of a single pass.
        """
        size = self.micro_batch_size
        micro_batches = -(-(len(self.mine) if self.constant else min(found, len(self.mine))) // size)
        blanks = [blank_like(template)] * (micro_batches * size - len(samples))
        rows = [*samples, *blanks]
        return [collate(rows[i : i + size]) for i in range(0, len(rows), size)]

    def keeps(self, found: int) -> bool:
        """Return whether a global batch with ``found`` samples is used."""
        return found == self.global_batch_size or (found > 0 and not self.drop_last)


class MapSource:
    """Steps of samples that are found by index; jobs may run in any order and at once."""

    def __init__(self, dataset: MapDataset, order: GlobalOrder, slicing: Slicing) -> None:
        self._dataset = dataset
        self._order = order
        self._slicing = slicing

    def jobs(self, position: Position) -> Iterator[Job]:
        """Yield the jobs of the steps after ``position``; endless, unless the data is passed once."""
        size = self._slicing.global_batch_size
        start = position.samples
        while True:
            count = size if self._slicing.repeat else max(0, min(size, len(self._dataset) - start))
            if not self._slicing.keeps(count):
                return
            indices = self._order.indices(start, start + count).tolist()
            yield self._job(indices, start, Position(samples=start + count))
            start += count

    def _job(self, indices: list[int], start: int, after: Position) -> Job:
        def build() -> Step:
            mine = self._slicing.mine
            samples = [self._read(indices[place], start + place) for place in mine if place < len(indices)]
            template = samples[0] if samples else self._read(indices[0], start)
            return Step(batches=self._slicing.cut(samples, template, len(indices)), after=after)

        return build

    def _read(self, index: int, position: int) -> Sample:
        return self._dataset.at(index, position // len(self._dataset))


class StreamSource:
    """Steps of samples in the dataset's own order; each rank reads them all and keeps its own.

    Jobs run one after the other (one worker), and each records the position of the dataset after its samples.
    """

    def __init__(self, dataset: IterableDataset, slicing: Slicing) -> None:
        self._dataset = dataset
        self._slicing = slicing
        self._beginning = dataset.state_dict()

    def jobs(self, position: Position) -> Iterator[Job]:
        """Yield endless jobs of the steps after ``position``; they build None after the end of a single pass."""
        self._dataset.load_state_dict(self._beginning if position.stream is None else position.stream)
        samples = self._endless() if self._slicing.repeat else iter(self._dataset)
        reached = position.samples

        def build() -> Step | None:
            nonlocal reached
            slicing = self._slicing
            template, mine, count = None, [], 0
            for count, sample in zip(range(1, slicing.global_batch_size + 1), samples, strict=False):
                template = template or sample
                if count - 1 in slicing.mine:
                    mine.append(sample)
            if template is None or not slicing.keeps(count):
                return None
            reached += count
            after = Position(samples=reached, stream=self._dataset.state_dict())
            return Step(batches=slicing.cut(mine, template, count), after=after)

        while True:
            yield build

    def _endless(self) -> Iterator[Sample]:
        empty_passes = 0  # one may be: a checkpoint at the very end of the data
        while empty_passes < 2:
            empty_passes += 1
            for sample in self._dataset:
                empty_passes = 0
                yield sample
            self._dataset.load_state_dict(self._beginning)
        raise EmptyDataset()
