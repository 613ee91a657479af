"""A bar on standard error for what moves many bytes; nothing where no terminal reads it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

__all__ = ["byte_bar"]


@contextmanager
def byte_bar(size_bytes: int, label: str) -> Iterator[Callable[[int], None]]:
    """Draw a bar of ``size_bytes`` bytes while the block runs; yields what adds to it, from any thread."""
    lock = threading.Lock()
    with tqdm(
        total=size_bytes,
        desc=label,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
        leave=False,
    ) as bar:

        def add(done_bytes: int) -> None:
            with lock:
                bar.update(done_bytes)

        yield add
