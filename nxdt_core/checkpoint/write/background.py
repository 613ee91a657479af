"""One save on a separate thread, with a deadline. Torch-free."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Literal, TypeVar

from nxdt_core.errors import NxdtError
from nxdt_core.errors.checkpoints import SaveTookTooLong, StorageError

__all__ = ["BackgroundJob"]

_NICENESS = 15
"""Niceness of the thread and of those that it starts: on a host that computes, a save uses the cores that training
leaves free. On two cores the next ten steps take 1.2 times as long as those before, and 1.4 times without it."""

T = TypeVar("T")


class BackgroundJob(Generic[T]):
    """Runs ``work`` at once, in parallel with the caller.

    The thread does not keep the process alive: a store that hangs cannot be interrupted, only left behind.

    Args:
        work: called with this job.
        where: what ``work`` is about, for messages.
        deadline_s: how long it may take.
        yields: give other threads of this process the cores first, for a caller that computes meanwhile.
    """

    def __init__(
        self, work: Callable[[BackgroundJob[T]], T], *, where: str, deadline_s: float, yields: bool = True
    ) -> None:
        self._where = where
        self._deadline_s = deadline_s
        self._yields = yields
        self._ends_at = time.monotonic() + deadline_s
        self._value: T | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"save {where}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> Literal["running", "done", "failed"]:
        """Return its state; work that runs beyond its deadline has failed."""
        if self._ended.is_set():
            return "done" if self._error is None else "failed"
        return "running" if time.monotonic() < self._ends_at else "failed"

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, at most until its deadline."""
        left_s = max(0.0, self._ends_at - time.monotonic())
        self._ended.wait(left_s if timeout_s is None else min(timeout_s, left_s))

    def give_up(self) -> None:
        """Mark it as late, regardless of the time left: another rank's time is over."""
        self._ends_at = min(self._ends_at, time.monotonic())

    def check_deadline(self) -> None:
        """Called by ``work``, too, before what may not happen late.

        Raises:
            SaveTookTooLong: the deadline is over.
        """
        late = self._too_late()
        if late is not None:
            raise late

    def raise_failure(self) -> None:
        """Raise why it failed; nothing where it runs or is done. Does not wait.

        Raises:
            SaveTookTooLong: it runs beyond its deadline.
        """
        if self._ended.is_set():
            if self._error is not None:
                raise self._error
        else:
            self.check_deadline()

    def result(self) -> T:
        """Return what ``work`` returned; for a job that is done."""
        assert self.state == "done", "a job has a result once it is done"
        return self._value  # type: ignore[return-value]

    def _run(self, work: Callable[[BackgroundJob[T]], T]) -> None:
        if self._yields:
            _yield_cores()
        try:
            self._value = work(self)
        except NxdtError as error:
            self._error = error
        except BaseException as error:  # raised by raise_failure
            self._error = self._too_late(error) or error
        finally:
            self._ended.set()

    def _too_late(self, cause: BaseException | None = None) -> StorageError | None:
        """The error of a job beyond its deadline; ``cause``: what a wait for another rank ended in by then."""
        if time.monotonic() <= self._ends_at:
            return None
        error = SaveTookTooLong(where=self._where, reason=f"it takes more than {self._deadline_s:g} s")
        error.__cause__ = cause
        return error


def _yield_cores() -> None:
    """Let other threads of this process go first. Only Linux has priorities of threads."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
