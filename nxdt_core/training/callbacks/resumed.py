"""Differences between a resumed run and the one that it resumes, one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytorch_lightning as pl

from nxdt_core.checkpoint.format.averages import has_average
from nxdt_core.training.callbacks.console import Console

if TYPE_CHECKING:
    from nxdt_core.training.lightning.module import NxdtModule

__all__ = ["ResumeNotes"]


class ResumeNotes(pl.Callback):
    """Compares the schedule's end and the plugins with those of the checkpoint."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def on_train_start(self, trainer: pl.Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """Print what differs between this run and the one that wrote the checkpoint."""
        if pl_module.resumed is None:
            return
        before, now = pl_module.resumed_horizon, pl_module.session.horizon.max_steps
        if before != now:
            self._console.say(f"the learning-rate schedule now ends at step {now} instead of {before}")
        if pl_module.resumed.facts.plugin_fingerprint not in ("", pl_module.config.kernel.fingerprint()):
            self._console.say("the installed plugins are not those that wrote the checkpoint")
        averages = pl_module.session.average is not None
        if averages != has_average(pl_module.resumed):
            news = "begins in this run" if averages else "ends here, since exp_manager.ema.enable is false"
            self._console.say(f"the average of the weights {news}")
