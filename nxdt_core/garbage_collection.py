"""How often Python's garbage collector runs: rarely while a command imports and builds, as usual while it trains, and
once at its end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collect_as_usual", "collect_once_at_exit", "rare_collections"]

_USUAL = gc.get_threshold()
_RARELY = (100_000, *_USUAL[1:])


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the collector run after 100,000 new objects instead of 700.

    Imports of torch make many objects and no garbage; collections are a fifth of their time.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def collect_as_usual() -> None:
    """Let the collector run as Python sets it, within :func:`rare_collections` too. A user's thresholds are kept."""
    if gc.get_threshold() == _RARELY:
        gc.set_threshold(*_USUAL)


def collect_once_at_exit() -> None:
    """Collect garbage, after which the interpreter looks at no object again while it takes modules apart.

    For :mod:`atexit`. The interpreter collects several times, which takes 1.6 CPU-seconds after a run and frees what
    the system frees with the process. Files that the run dropped in cycles are still closed here.
    """
    gc.collect()
    gc.freeze()
