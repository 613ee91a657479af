"""When Python's garbage collector runs: rarely while a command imports and builds, between steps while it trains
(``trainer.gc_interval``), and once at its end."""

from __future__ import annotations

import gc
from typing import final

_USUAL = gc.get_threshold()
RARELY = (100_000, *_USUAL[1:])
"""Thresholds of a command: the collector runs after 100,000 new objects instead of 700."""


def collect_as_usual() -> None:
    """Let the collector run as Python sets it, in a command, too. A user's thresholds are kept."""
    if gc.get_threshold() == RARELY:
        gc.set_threshold(*_USUAL)


def collect_once_at_exit() -> None:
    """Collect garbage, after which the interpreter looks at no object again while it takes modules apart.

    For :mod:`atexit`. The interpreter collects several times, which takes 1.6 CPU-seconds after a run and frees what
    the system frees with the process. Files that the run dropped in cycles are still closed here.
    """
    gc.collect()
    gc.freeze()


@final
class GarbageCollection:
    """Turns automatic collections off while a run trains, and collects every so many steps.

    Left to itself each rank collects when it has made enough objects, somewhere in a step, and the others wait for it
    in their next collective. What the first step leaves (modules, optimizer state, compiled graphs) is frozen: no
    collection looks at it again.

    Args:
        interval: steps between two collections; 0 changes nothing, None takes what suits the device.
    """

    def __init__(self, interval: int | None) -> None:
        self.interval = interval
        self._disabled = False
        self._froze = False

    def begin(self, default: int) -> None:
        """Turn automatic collections off for training; may be called again.

        Args:
            default: steps between two collections where the constructor got None: the device's ``gc_interval``.
        """
        if self.interval is None:
            self.interval = default
        if self.interval and not self._disabled:
            self._disabled = gc.isenabled()
            gc.disable()

    def after_step(self, step: int) -> None:
        """Collect after the first step of this process, and after steps whose number the interval divides."""
        if not self.interval:
            return
        if not self._froze:  # the first step
            gc.collect()
            gc.freeze()
            self._froze = True
        elif step % self.interval == 0:
            gc.collect()

    def close(self) -> None:
        """Let the collector work as it did before the run; may be called twice.

        It looks again at all objects, those that others froze too: one thaws all or none, and a model that stayed
        frozen would keep its memory for the rest of the process. The count of frozen objects does not show whose they
        are: Python 3.12 begins with 375.
        """
        if self._froze:
            gc.unfreeze()
            self._froze = False
        if self._disabled:
            gc.enable()
            self._disabled = False
