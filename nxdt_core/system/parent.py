"""Ends this process when the one that started it has ended, however that ended.

A rank holds a connection to its launcher, which the kernel closes with the launcher. It has none during its first
seconds, while it imports torch, and later none to the launcher of a further node. Therefore the kernel is asked to kill
it, or a thread watches the parent where the kernel cannot be asked.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Final

__all__ = ["PARENT_VARIABLE", "end_with_parent", "outlive_parent"]

PARENT_VARIABLE: Final = "NXDT_PARENT"
"""Process id of the process with which a command ends; set for the command only."""
_SET_PARENT_DEATH_SIGNAL: Final = 1
"""``PR_SET_PDEATHSIG`` of prctl(2). The signal comes when the thread ends that started this process, which is the
launcher's main thread or waits for the ranks."""
_POLL_S: Final = 0.5

_outlives = threading.Event()


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the signal ``number`` end this process together with its parent, if ``NXDT_PARENT`` names the parent."""
    parent = os.environ.pop(PARENT_VARIABLE, "")  # what this process starts has another parent
    if not parent.isdecimal():
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, number)
    else:
        threading.Thread(target=_watch, args=(int(parent), number), name="parent", daemon=True).start()
    if os.getppid() != int(parent):  # it ended before the kernel was asked
        os.kill(os.getpid(), number)


def outlive_parent() -> None:
    """Undo :func:`end_with_parent`: a connection shows from now on that the parent has ended."""
    _outlives.set()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, 0)


def _watch(parent: int, number: signal.Signals) -> None:
    while not _outlives.is_set():
        if os.getppid() != parent:
            os.kill(os.getpid(), number)
        time.sleep(_POLL_S)
