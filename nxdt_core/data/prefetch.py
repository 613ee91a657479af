"""Jobs done ahead by threads, their results in order.

Threads, not processes: a tokenised sample is a slice of a numpy array, cheaper to copy than to send between
processes, and threads share one dataset, one set of open files and one way to fail.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

__all__ = ["run_ahead"]

T = TypeVar("T")

_AHEAD_PER_WORKER = 2


def run_ahead(jobs: Iterator[Callable[[], T]], workers: int) -> Iterator[T]:
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
