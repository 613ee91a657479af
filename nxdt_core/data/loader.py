"""The loader of a run: one item per step, an exact position, the same samples in every layout.

The global batch of a step is the same in every layout; rank r of n takes its r-th of n equal slices. Where a
single pass ends within a global batch, every rank yields as many micro-batches as the fullest, and rows without a
sample are blank (see :func:`blank_like`), so that collectives of all ranks still meet.

Threads work ahead, not processes: a tokenised sample is a slice of a numpy array, cheaper to copy than to send between
processes, and threads share one dataset, one set of open files and one way to fail.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed

from nxdt_core.data.sampler import GlobalOrder
from nxdt_core.errors.data import BadBatchSize, DataChanged, DataRankMissing, EmptyDataset, MixedSamples
from nxdt_core.protocols.batch import IGNORE_INDEX, Batch, Sample
from nxdt_core.protocols.dataset import IterableDataset, MapDataset

_FIELDS: Mapping[str, tuple[type[np.generic], Callable[[Sample], np.ndarray]]] = {
    "input_ids": (np.int64, lambda sample: sample.input_ids),
    "labels": (np.int64, lambda sample: sample.labels),
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
"""Dtype of each field, and what the absence of an optional one means."""
T = TypeVar("T")
_AHEAD_PER_WORKER = 2


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
    tensors: dict[str, Any] = {}
    length = shapes[0][-1]
    for name, (dtype, absent) in _FIELDS.items():
        arrays = [getattr(sample, name) for sample in samples]
        if any(array is not None for array in arrays):
            pairs = zip(samples, arrays, strict=True)
            filled = [absent(sample) if array is None else array for sample, array in pairs]
            tensors[name] = torch.from_numpy(np.stack(filled, dtype=dtype, casting="unsafe").reshape(-1, length))
    values: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(chain.from_iterable(sample.values for sample in samples)):
        filled = [sample.values.get(name, np.zeros(sample.labels.shape)) for sample in samples]
        values[name] = torch.from_numpy(np.stack(filled, dtype=np.float32, casting="unsafe").reshape(-1, length))
    origins = tuple(sample.origin for sample in samples)
    rows = 1 if len(shapes[0]) == 1 else shapes[0][0]
    return Batch(**tensors, values=values, rows_per_sample=rows, origins=origins if any(origins) else ())


def blank_like(sample: Sample) -> Sample:
    """Return a sample of the same shape that is all padding, without a loss; fills up the last batch of a pass."""
    return replace(
        sample,
        labels=np.full_like(sample.labels, IGNORE_INDEX),
        loss_weights=None if sample.loss_weights is None else np.zeros_like(sample.loss_weights),
        padding=np.ones(sample.labels.shape, np.bool_),
        origin=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place between two steps."""

    samples: int = 0
    """Samples of the global order before it."""
    stream: dict[str, Any] | None = None
    """State of an iterable dataset; None means its beginning. Always None for map-style data."""


Step = tuple[list[Batch], Position]
"""One rank's part of a global batch, and the position after it."""
Job = Callable[[], Step | None]
"""Builds a step; None where the data of a single pass ended before it."""


def prefetched(jobs: Iterator[Callable[[], T]], workers: int) -> Iterator[T]:
    """Yield the results of ``jobs``, in order, with up to two jobs a worker begun ahead.

    ``jobs`` is advanced in the caller's thread only. An exception of a job is raised where its result would have
    come. Leaving the iteration, however it happens, cancels what has not begun and waits for what has. With 0
    workers each job runs when its result is asked for.
    """
    if workers < 1:
        for job in jobs:
            yield job()
        return
    ending = sys.is_finalizing  # held here: the globals of modules are cleared before the last generators end
    pool = ThreadPoolExecutor(workers, thread_name_prefix="nxdt-data")
    begun: deque[Future[T]] = deque()
    try:
        begun.extend(pool.submit(job) for job in islice(jobs, workers * _AHEAD_PER_WORKER))
        while begun:
            result = begun.popleft().result()
            begun.extend(pool.submit(job) for job in islice(jobs, 1))
            yield result
    finally:
        if not ending():
            pool.shutdown(wait=True, cancel_futures=True)


class GlobalBatchLoader:
    """Iterates global batches: each item is the list of this rank's micro-batches of one step.

    The samples of step k are those at the places ``k * global_batch_size`` … of the global order. That order does not
    depend on ranks, micro-batches or workers, so a run may stop at any step and resume with other ones.
    Epochs follow each other without a gap: a batch may hold the end of one and the beginning of the next.

    Args:
        dataset: samples by index, or in its own order, which ``seed`` and ``shuffle`` do not change.
        global_batch_size: samples of one optimizer step, over all ranks.
        micro_batch_size: samples of one forward pass on one rank.
        seed: decides the order, together with the number of the epoch.
        shuffle: whether map-style samples are taken in a random order, another one each epoch.
        dp_rank, dp_size: which of the data-parallel ranks this is; may be left out in a single process.
        drop_last: leave out the last global batch of a single pass where it is not full. (A repeating loader has
            none such.) Otherwise it is filled up with samples without loss tokens to whole micro-batches, equally
            many on each rank.
        repeat: begin again at the end of the data. False is one pass, for validation; each new iteration is then a
            separate pass, unless ``load_state_dict`` has just set a position.
        constant_micro_batches: fill the last global batch of a single pass up to as many micro-batches as all others
            have, for devices that compile a graph for each number.
        num_workers: threads that prepare steps ahead; 0 prepares each when it is asked for. Map-style datasets are
            read from that many threads at once, others from one.

    Raises:
        DataRankMissing: a process group of several processes exists, and no rank was passed.
        BadBatchSize: the global batch is not a multiple of micro-batch size x ranks.
        EmptyDataset: the dataset has no samples.
    """

    def __init__(
        self,
        dataset: MapDataset | IterableDataset,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int,
        shuffle: bool,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        drop_last: bool = False,
        repeat: bool = True,
        num_workers: int = 0,
        constant_micro_batches: bool = False,
    ) -> None:
        if dp_rank is None and dp_size is None:
            if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
                raise DataRankMissing(world_size=distributed.get_world_size())
            dp_rank, dp_size = 0, 1
        elif dp_rank is None or dp_size is None:
            raise ValueError("pass dp_rank and dp_size together")
        if min(global_batch_size, micro_batch_size, dp_size) < 1 or global_batch_size % (micro_batch_size * dp_size):
            raise BadBatchSize(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, dp_size=dp_size)
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank {dp_rank} is not below dp_size {dp_size}")
        per_rank = global_batch_size // dp_size
        self._mine = range(dp_rank * per_rank, (dp_rank + 1) * per_rank)
        """This rank's places within a global batch."""
        self._dataset = dataset
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._constant = constant_micro_batches
        self._repeat = repeat
        self._drop_last = drop_last
        self._workers = num_workers
        if isinstance(dataset, MapDataset):
            self._indices = GlobalOrder(len(dataset), seed=seed, shuffle=shuffle).indices
            self._order = f"shuffled with seed {seed}" if shuffle else "in sequence"
        else:
            self._beginning = dataset.state_dict()
            self._order = "the dataset's own"
            self._workers = min(num_workers, 1)
        self._position = Position()
        self._loaded = False
        self._running: weakref.ref[Generator[list[Batch], None, None]] | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        """Continue after the last step that was yielded; an iteration that still runs ends.

        (Two at once would both move an iterable dataset, whose position is its own.)
        """
        self.close()
        if not (self._repeat or self._loaded):
            self._position = Position()
        self._loaded = False
        iteration = self._iterate()
        self._running = weakref.ref(iteration)
        return iteration

    def _iterate(self) -> Generator[list[Batch], None, None]:
        dataset = self._dataset
        jobs = self._map_jobs(dataset) if isinstance(dataset, MapDataset) else self._stream_jobs(dataset)
        for step in prefetched(jobs, self._workers):
            if step is None:
                return
            batches, self._position = step
            yield batches

    def _map_jobs(self, dataset: MapDataset) -> Iterator[Job]:
        """Yield the jobs of the next steps, of samples that are found by index; endless, unless the data is passed
        once. Jobs may run in any order and at once."""

        def build(indices: list[int], start: int) -> Step:
            mine = range(self._mine.start, min(self._mine.stop, len(indices)))
            samples = [dataset.at(indices[place], (start + place) // len(dataset)) for place in mine or (0,)]
            batches = self._cut(samples if mine else (), samples[0], len(indices))
            return batches, Position(samples=start + len(indices))

        size, start = self._global_batch_size, self._position.samples
        while True:
            count = size if self._repeat else max(0, min(size, len(dataset) - start))
            if count == 0 or (count < size and self._drop_last):
                return
            yield partial(build, self._indices(start, start + count).tolist(), start)
            start += count

    def _stream_jobs(self, dataset: IterableDataset) -> Iterator[Job]:
        """Yield endless jobs of the next steps, of samples in the dataset's own order; they build None after the end of
        a single pass.

        Each rank reads all samples and keeps its own. Jobs run one after the other (one worker), and each records the
        position of the dataset after its samples.
        """

        def endless() -> Iterator[Sample]:
            empty_passes = 0  # one may be: a checkpoint at the very end of the data
            while empty_passes < 2:
                empty_passes += 1
                for sample in dataset:
                    empty_passes = 0
                    yield sample
                dataset.load_state_dict(self._beginning)
            raise EmptyDataset()

        dataset.load_state_dict(self._beginning if self._position.stream is None else self._position.stream)
        samples = endless() if self._repeat else iter(dataset)
        size, reached = self._global_batch_size, self._position.samples

        def build() -> Step | None:
            nonlocal reached
            template, mine, count = None, [], 0
            for count, sample in zip(range(1, size + 1), samples, strict=False):
                template = template or sample
                if count - 1 in self._mine:
                    mine.append(sample)
            if template is None or (count < size and self._drop_last):
                return None
            reached += count
            return self._cut(mine, template, count), Position(samples=reached, stream=dataset.state_dict())

        while True:
            yield build

    def _cut(self, samples: Sequence[Sample], template: Sample, count: int) -> list[Batch]:
        """Return the micro-batches of this rank's ``samples``, filled up with blanks made of ``template``.

        Args:
            samples: those of the ``count`` samples of the global batch at this rank's places.
            template: any sample of the global batch.
            count: samples in the global batch; fewer than its size only at the end of a single pass.
        """
        size, most = self._micro_batch_size, len(self._mine)
        micro_batches = -(-(most if self._constant else min(count, most)) // size)
        missing = micro_batches * size - len(samples)
        rows = [*samples, *([blank_like(template)] * missing if missing else ())]
        return [collate(rows[i : i + size]) for i in range(0, len(rows), size)]

    def close(self) -> None:
        """End the running iteration and its threads. An iteration without references ends by itself."""
        running = self._running() if self._running is not None else None
        if running is not None:
            running.close()
        self._running = None

    @property
    def consumed_samples(self) -> int:
        """Samples, over all ranks, of the steps that were yielded since the run began."""
        return self._position.samples

    def state_dict(self) -> dict[str, Any]:
        """JSON-able position behind the last step that was yielded, however far the workers have got."""
        state: dict[str, Any] = {
            "consumed_samples": self._position.samples,
            "fingerprint": self._dataset.fingerprint(),
            "order": self._order,
        }
        if self._position.stream is not None:
            state["stream"] = self._position.stream
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin behind the position of ``state``.

        Raises:
            DataChanged: the state is of other data, or of another order of it.
        """
        for key, aspect, current in (
            ("fingerprint", "data of the fingerprint", self._dataset.fingerprint()),
            ("order", "samples", self._order),
        ):
            if state[key] != current:
                raise DataChanged(aspect=aspect, saved=state[key], found=current)
        self._position = Position(samples=int(state["consumed_samples"]), stream=state.get("stream"))
        self._loaded = True
