"""How long ``torch.compile`` took, said apart from the time of the steps."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl

from nxdt_core.compile_counts import CompileClock
from nxdt_core.engines.compile_cache import graph_origins
from nxdt_core.progress import PROGRESS
from nxdt_core.training.callbacks.console import Console
from nxdt_core.training.callbacks.logger_tags import tag

if TYPE_CHECKING:
    from nxdt_core.config import ResolvedConfig
    from nxdt_core.training.lightning.module import NxdtModule

__all__ = ["CompileTime"]


class CompileTime(pl.Callback):
    """Says how many seconds went into compiling, after the first step and each later one that compiled, and which
    graphs came from the cache.

    Where ``model.compile`` is set, it also says before the first step that this one takes longer.

    Loggers get ``perf/compile_time_s``, the seconds of the run so far.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._clock = CompileClock()
        self._running = ExitStack()
        self._reported_s = 0.0
        self._reported = graph_origins()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start to measure the seconds that compiling takes."""
        self._running.enter_context(self._clock)
        config: ResolvedConfig | None = getattr(pl_module, "config", None)
        if config is not None and config.run.model.compile:
            self._console.say("compiling: the first step takes longer")

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: NxdtModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Say what the step compiled."""
        seconds = self._clock.seconds
        if seconds == self._reported_s:
            return
        if PROGRESS.start:  # the first step
            PROGRESS.spent("compile", seconds)
        step = pl_module.train_state.step
        graphs = graph_origins()
        self._console.say(
            f"step {step}: compiling took {seconds - self._reported_s:.1f} s (graphs: {graphs - self._reported})"
        )
        self._reported_s, self._reported = seconds, graphs
        for logger in trainer.loggers:
            logger.log_metrics({tag("compile_time_s"): seconds}, step)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop measuring."""
        self._running.close()
