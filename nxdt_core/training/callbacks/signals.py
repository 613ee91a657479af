"""Ctrl-C and SIGTERM: stop at the next step boundary, with a checkpoint. A second one stops at once."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import pytorch_lightning as pl

from nxdt_core.training.callbacks.console import Console

__all__ = ["StopSignals"]


class StopSignals(pl.Callback):
    """Turns signals into a clean stop; ``received`` tells the caller which one came.

    Lightning installs handlers of its own that would raise in the middle of a step: ours are set after its and
    taken away after the fit.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, console: Console) -> None:
        self._console = console
        self._before: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the signals over."""
        for number in self._SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask the trainer to stop once a signal has come."""
        if self.received is not None:
            trainer.should_stop = True

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        self._console.say(f"{self.received.name}: stopping after this step; once more stops at once, without saving")
