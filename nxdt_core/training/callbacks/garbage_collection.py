"""``trainer.gc_interval``: Python's garbage collector runs between steps, on all ranks after the same ones."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl

if TYPE_CHECKING:
    from nxdt_core.training.lightning.module import NxdtModule

__all__ = ["GarbageCollection"]


class GarbageCollection(pl.Callback):
    """Turns automatic collections off while a run trains, and collects every so many steps.

    Left to itself each rank collects when it has made enough objects, somewhere in a step, and the others wait for it
    in their next collective. What the first step leaves (modules, optimizer state, compiled graphs) is frozen: no
    collection looks at it again.

    Args:
        interval: steps between two collections.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        """0: nothing is to be done."""
        self._disabled = False
        self._in_first_step = True
        self._froze = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Turn automatic collections off."""
        self._disabled = gc.isenabled()
        gc.disable()

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: NxdtModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Collect after the first step of this process, and after steps whose number the interval divides."""
        if self._in_first_step:
            self._in_first_step = False
            gc.collect()
            self._froze = gc.get_freeze_count() == 0  # else others have frozen objects, which must stay so
            gc.freeze()
        elif pl_module.train_state.step % self.interval == 0:
            gc.collect()

    def close(self) -> None:
        """Let the collector work as it did before the run."""
        if self._froze:
            gc.unfreeze()
            self._froze = False
        if self._disabled:
            gc.enable()
            self._disabled = False
