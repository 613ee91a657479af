"""``trainer.gc_interval``: Python's garbage collector runs between steps, on all ranks after the same ones."""

from __future__ import annotations

import gc
from typing import final

import torch

from nxdt_core.distributed.devices import max_memory_bytes, profile_of

__all__ = ["GarbageCollection"]


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
        self._in_first_step = True
        self._froze = False

    @staticmethod
    def of_earlier_runs(device: torch.device) -> None:
        """Free what earlier runs of this process left on an accelerator. Their models are in reference cycles, so that
        they would stay next to the next one until its first step is over."""
        if not profile_of(device).host and max_memory_bytes(device):
            gc.collect()

    def begin(self, device: torch.device) -> None:
        """Turn automatic collections off for training on ``device``; may be called again."""
        if self.interval is None:
            self.interval = profile_of(device).gc_interval
        if self.interval and not self._disabled:
            self._disabled = gc.isenabled()
            gc.disable()

    def after_step(self, step: int) -> None:
        """Collect after the first step of this process, and after steps whose number the interval divides."""
        if not self.interval:
            return
        if self._in_first_step:
            self._in_first_step = False
            gc.collect()
            self._froze = gc.get_freeze_count() == 0  # else others have frozen objects, which must stay so
            gc.freeze()
        elif step % self.interval == 0:
            gc.collect()

    def close(self) -> None:
        """Let the collector work as it did before the run; may be called twice."""
        if self._froze:
            gc.unfreeze()
            self._froze = False
        if self._disabled:
            gc.enable()
            self._disabled = False
        self._in_first_step = True
