"""Lets the adapter write its files next to the last checkpoint of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytorch_lightning as pl

from nxdt_core.config import ResolvedConfig
from nxdt_core.training import build

if TYPE_CHECKING:
    from nxdt_core.training.lightning.module import NxdtModule

__all__ = ["AdapterFinish"]


class AdapterFinish(pl.Callback):
    """At the end of training, once the last step is committed, however the run ended in order."""

    def __init__(self, config: ResolvedConfig, last_checkpoint: Callable[[NxdtModule], str | None]) -> None:
        """``last_checkpoint``: the address of the run's newest checkpoint."""
        self._config = config
        self._last_checkpoint = last_checkpoint

    def on_train_end(self, trainer: pl.Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """Call ``finish`` of every configured adapter."""
        for adapter in build.adapters(self._config):
            adapter.finish(self._last_checkpoint(pl_module), self._config, pl_module.engine.ranks)
