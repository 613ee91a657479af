"""The loader of a run: one item per step, an exact position, the same samples in every layout.

Threads work ahead, not processes: a tokenised sample is a slice of a numpy array, cheaper to copy than to send between
processes, and threads share one dataset, one set of open files and one way to fail.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

from torch import distributed

from nxdt_core.data.sampler import GlobalOrder
from nxdt_core.data.sources import MapSource, Position, Slicing, StreamSource
from nxdt_core.errors.data import BadBatchSize, DataChanged, DataRankMissing
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.dataset import IterableDataset, MapDataset

__all__ = ["GlobalBatchLoader", "prefetched"]


T = TypeVar("T")

_AHEAD_PER_WORKER = 2


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
            dp_rank, dp_size = _only_rank()
        elif dp_rank is None or dp_size is None:
            raise ValueError("pass dp_rank and dp_size together")
        if min(global_batch_size, micro_batch_size, dp_size) < 1 or global_batch_size % (micro_batch_size * dp_size):
            raise BadBatchSize(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, dp_size=dp_size)
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank {dp_rank} is not below dp_size {dp_size}")
        slicing = Slicing(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            repeat=repeat,
            drop_last=drop_last,
            constant=constant_micro_batches,
        )
        self._dataset = dataset
        self._repeat = repeat
        self._workers = num_workers
        self._source: MapSource | StreamSource
        if isinstance(dataset, MapDataset):
            self._source = MapSource(dataset, GlobalOrder(len(dataset), seed=seed, shuffle=shuffle), slicing)
            self._order = f"shuffled with seed {seed}" if shuffle else "in sequence"
        else:
            self._source = StreamSource(dataset, slicing)
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
        for step in prefetched(self._source.jobs(self._position), self._workers):
            if step is None:
                return
            self._position = step.after
            yield step.batches

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


def _only_rank() -> tuple[int, int]:
    """Return rank and size of a single process.

    Raises:
        DataRankMissing: there are several.
    """
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise DataRankMissing(world_size=distributed.get_world_size())
    return 0, 1
