"""Runs cases in a child process that may take so much memory and no more, and ends a case that hangs."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

__all__ = ["Watch", "bounded"]

_MEMORY_BYTES = 1 << 30
"""Of addresses, beyond what the process has when the cases begin."""
_CASE_S = 30
"""A case takes milliseconds; a chat template may take ten seconds before nxdt stops it."""


class Watch:
    """Notes the case that runs, and ends the process with its stack where the case does not end."""

    def __init__(self, directory: Path) -> None:
        self._case = directory / "case.txt"
        self._stack = (directory / "stack.txt").open("w+")

    @contextmanager
    def over(self, case: object) -> Iterator[None]:
        """Watch one case, which a report shows by its ``repr``."""
        self._case.write_bytes(repr(case)[:20_000].encode(errors="backslashreplace"))
        faulthandler.dump_traceback_later(_CASE_S, exit=True, file=self._stack)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def report(self) -> str:
        """The last case, and the stack where it hung."""
        return f"{self._case.read_text()}\n{Path(self._stack.name).read_text()}" if self._case.exists() else ""


def bounded(work: Callable[[Watch], None]) -> None:
    """Run ``work`` in a fork of this process with bounded memory.

    Raises:
        AssertionError: it raised something, was killed, or a case of it did not end; says which case.
    """
    with tempfile.TemporaryDirectory() as directory:
        watch = Watch(Path(directory))
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_limited, args=(work, watch, sender))
        child.start()
        sender.close()
        try:
            failure = receiver.recv()
        except EOFError:
            child.join()
            died = signal.Signals(-child.exitcode).name if (child.exitcode or 0) < 0 else f"status {child.exitcode}"
            failure = f"the process died ({died}) in the case {watch.report()}"
        child.join()
        assert failure is None, failure


def _limited(work: Callable[[Watch], None], watch: Watch, sender: Connection) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    failure = None
    try:
        work(watch)
    except BaseException:
        failure = traceback.format_exc()
    sender.send(failure)
    sender.close()
    os._exit(0)  # without the ends of pytest's own objects, which belong to the parent
