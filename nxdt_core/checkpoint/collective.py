"""Joint work of ranks, or of threads, which succeeds on all of them or fails on all of them. Torch-free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar, cast

from nxdt_core.errors import NxdtError
from nxdt_core.errors.checkpoints import CheckpointRankFailed
from nxdt_core.protocols.ranks import RankAgreement

__all__ = ["on_all_ranks"]


T = TypeVar("T")


R = TypeVar("R")


def rank_of(ranks: RankAgreement | None) -> int:
    """Return the number of this process among all; 0 where it is alone."""
    return 0 if ranks is None else ranks.rank


def on_all_ranks(ranks: RankAgreement | None, work: Callable[[], T], *, where: str) -> list[T]:
    """Call ``work`` on every rank; on every rank return what all of them returned, by rank.

    A rank on which it raised raises that. The others raise the same where it is an error for users, else
    :class:`CheckpointRankFailed`: the traceback of a bug is printed by the rank that has it.

    Args:
        ranks: all of them call this; None for a process that is alone.
        work: what it returns travels between ranks.
        where: what is worked on, for the message.
    """
    if ranks is None:
        return [work()]
    value: T | None = None
    failure: Exception | None = None
    shared: NxdtError | None = None
    try:
        value = work()
    except NxdtError as error:
        failure = shared = error
    except Exception as error:
        failure, reason = error, f"{type(error).__name__}: {error}"
        shared = CheckpointRankFailed(where=where, reason=reason, rank=ranks.rank)
    outcomes: list[tuple[T | None, NxdtError | None]] = ranks.all_gather_object((value, shared))
    for problem in (failure, *(error for _, error in outcomes)):
        if problem is not None:
            raise problem
    return [cast(T, value) for value, _ in outcomes]


def on_this_rank(ranks: RankAgreement | None, work: Callable[[], T], *, where: str) -> T:
    """Return what ``work`` returns here; it is called on every rank, and what it raises is raised on all, as by
    :func:`on_all_ranks`."""
    results: list[T] = []
    on_all_ranks(ranks, lambda: results.append(work()), where=where)
    return results[0]


def on_first_rank(ranks: RankAgreement | None, work: Callable[[], T], *, where: str) -> T:
    """Return what ``work`` returns on rank 0, where alone it is called; what it raises is raised on all, as by
    :func:`on_all_ranks`."""
    return cast(T, on_all_ranks(ranks, lambda: work() if rank_of(ranks) == 0 else None, where=where)[0])


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
            return [call.result() for call in calls if call in done]  # of all calls, or one of them raises
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
