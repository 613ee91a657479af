"""Threads that a plugin starts while it is imported and registered: they must not keep a command from ending.

Python waits for threads that are not daemons before it exits, and a thread cannot be ended from outside. So a thread
that a plugin starts here becomes a daemon before it runs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["threads_detached"]


@contextmanager
def threads_detached() -> Iterator[list[str]]:
    """Make daemons of the threads that this thread starts within the block.

    Yields:
        Their names, as they are started; those that were daemons anyway are left out.
    """
    started: list[threading.Thread] = []
    names: list[str] = []
    importing, start = threading.current_thread(), threading.Thread.start

    def detached(self: threading.Thread) -> None:
        if threading.current_thread() is importing and not self.daemon:
            self.daemon = True
            names.append(f"'{self.name}'")
            started.append(self)
        start(self)

    threading.Thread.start = detached  # type: ignore[method-assign]
    try:
        yield names
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        _leave_pools(started)


def _leave_pools(threads: list[threading.Thread]) -> None:
    """Let no thread pool wait for its threads at the exit, which it does for daemons, too."""
    pools = getattr(sys.modules.get("concurrent.futures.thread"), "_threads_queues", {})
    for thread in threads:
        pools.pop(thread, None)
