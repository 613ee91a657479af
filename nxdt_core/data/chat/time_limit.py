"""A limit on the time that a piece of Python takes, in any thread, without a signal or a separate process."""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["TookTooLong", "time_limit"]

_LOOK_S = 0.2


class TookTooLong(Exception):
    """Raised inside a block of :func:`time_limit` that takes longer than it may."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`TookTooLong` in the block once it has run for ``seconds``, at the next Python instruction.

    It ends loops and recursion of Python code; a single call of C code is not interrupted. A block costs two
    microseconds, so that it may be entered once per record of a data set. Blocks do not nest.
    """
    watch = _watch_of_process()
    watch.begin(seconds)
    try:
        yield
    except TookTooLong:
        watch.end(arrived=True)
        raise
    finally:
        watch.end()


class _Watch:
    """One thread per process that looks at all running blocks a few times per second."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._deadlines: dict[int, float] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._look, name="nxdt time limit", daemon=True).start()

    def begin(self, seconds: float) -> None:
        with self._lock:
            self._deadlines[threading.get_ident()] = time.monotonic() + seconds

    def end(self, *, arrived: bool = False) -> None:
        with self._lock:
            sent = self._deadlines.pop(threading.get_ident(), 0.0) == math.inf
        if sent and not arrived:
            for _ in range(1000):  # the exception is on its way: let it arrive here, and not behind the block
                pass

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            now = time.monotonic()
            with self._lock:
                for thread, deadline in self._deadlines.items():
                    if now > deadline:
                        self._deadlines[thread] = math.inf
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(thread), ctypes.py_object(TookTooLong)
                        )


_watches: list[_Watch] = []


def _watch_of_process() -> _Watch:
    """The watch of this process; a process that was forked makes its own, since threads are not inherited."""
    if not _watches or _watches[0].process != os.getpid():
        _watches[:] = [_Watch()]
    return _watches[0]
