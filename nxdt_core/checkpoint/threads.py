"""Many files at once: work on each in a few threads, where the first failure ends it all. Torch-free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

__all__ = ["in_threads"]

T = TypeVar("T")
R = TypeVar("R")


def in_threads(
    work: Callable[[T], R], items: Sequence[T], *, threads: int, stop: threading.Event | None = None
) -> list[R]:
    """Return what ``work`` returns for each of ``items``, in their order; ``threads`` of them are worked on at a time.

    Args:
        work: called in one of the threads.
        items: what to work on, the longest first where that is known.
        threads: at least 1.
        stop: is set when a call has failed, or Ctrl-C was pressed, so that long calls can end early.

    Raises:
        BaseException: what a call raised, once all calls that had begun have ended; the first one in the order of
            ``items`` among those that had failed by then.
    """
    stop = stop or threading.Event()
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="checkpoint-file") as pool:
        calls = [pool.submit(work, item) for item in items]
        try:
            done, _ = wait(calls, return_when=FIRST_EXCEPTION)
            failed = [call for call in calls if call in done and call.exception() is not None]
            for call in failed:
                call.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [call.result() for call in calls]
