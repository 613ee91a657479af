"""What each process does where several work on one store. Torch-free: starting one takes a fraction of a second."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from nxdt_core.protocols.store import CheckpointStore

__all__ = ["Opener", "RankReport", "work_together"]

Opener = Callable[[], CheckpointStore]

ROUNDS = 8
_TIMEOUT_S = 120.0
_barrier: Any = None


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one process saw of a collective save."""

    won: tuple[bool, ...]
    """Of each round: whether its ``put_if_absent`` created the object."""
    own: dict[str, int]
    """Keys that it wrote, and their sizes."""
    listed: frozenset[str]
    """All keys, once every process had written."""


def work_together(open_store: Opener, ranks: int) -> list[RankReport]:
    """Let ``ranks`` new processes write, compete and list at once.

    Args:
        open_store: opens the store in a separate process; it is pickled.
        ranks: how many.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(ranks, timeout=_TIMEOUT_S)
    with ProcessPoolExecutor(ranks, mp_context=context, initializer=_enter, initargs=(barrier,)) as pool:
        return list(pool.map(_work, [open_store] * ranks, range(ranks), timeout=_TIMEOUT_S))


def _enter(barrier: Any) -> None:
    global _barrier  # noqa: PLW0603  (a barrier reaches a process when it starts, and not later)
    _barrier = barrier


def _work(open_store: Opener, rank: int) -> RankReport:
    try:
        storage, own, won = open_store(), {}, []
        for round_ in range(ROUNDS):
            key, size = f"shared/{round_}/rank-{rank}", 1000 * rank + round_
            _barrier.wait()
            with storage.open_write(key) as stream:
                stream.write(bytes(size))
            own[key] = size
            won.append(storage.put_if_absent(f"shared/{round_}/manifest", bytes([rank]) * 4096))
        _barrier.wait()
        return RankReport(tuple(won), own, frozenset(info.key for info in storage.list()))
    except BaseException:
        _barrier.abort()
        raise
