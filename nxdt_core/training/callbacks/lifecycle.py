"""Notifies plugins of the events of a run: one hook call per event, at most one per step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pytorch_lightning as pl

from nxdt_core.config import ResolvedConfig
from nxdt_core.kernel.contexts import FitContext, StepContext
from nxdt_core.training.callbacks.metrics import MetricsWriter
from nxdt_core.training.callbacks.signals import StopSignals

if TYPE_CHECKING:
    from nxdt_core.training.lightning.module import NxdtModule

__all__ = ["LifecycleHooks"]


class LifecycleHooks(pl.Callback):
    """Calls ``nxdt_fit_start``, ``nxdt_step_end`` and ``nxdt_fit_end``."""

    def __init__(self, config: ResolvedConfig, metrics: MetricsWriter, signals: StopSignals) -> None:
        self._config = config
        self._hooks = config.kernel.hooks
        self._metrics = metrics
        self._signals = signals

    def on_train_start(self, trainer: pl.Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """Call the hook ``nxdt_fit_start`` of all plugins."""
        self._hooks.nxdt_fit_start(self._fit(pl_module, "running"))

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: NxdtModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """``nxdt_step_end``; figures only where this step logged them."""
        state, row = pl_module.train_state, self._metrics.last
        logged = row if row.get("step") == state.step else {}
        self._hooks.nxdt_step_end(
            StepContext(
                step=state.step,
                consumed_samples=state.consumed_samples,
                consumed_tokens=state.consumed_tokens,
                metrics={key: float(value) for key, value in logged.items() if value is not None},
                rank=pl_module.engine.rank_info.rank,
            )
        )

    def on_train_end(self, trainer: pl.Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """``nxdt_fit_end`` of a run that finished or was asked to stop."""
        status: Literal["stopped", "finished"] = "finished" if self._signals.received is None else "stopped"
        self._hooks.nxdt_fit_end(self._fit(pl_module, status))

    def on_exception(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: NxdtModule, exception: BaseException
    ) -> None:
        """``nxdt_fit_end`` of a run that broke."""
        if hasattr(pl_module, "model"):
            self._hooks.nxdt_fit_end(self._fit(pl_module, "failed"))

    def _fit(self, module: NxdtModule, status: Literal["running", "finished", "stopped", "failed"]) -> FitContext:
        return FitContext(
            run_dir=self._config.run_dir,
            rank=module.engine.rank_info.rank,
            world_size=module.engine.rank_info.world_size,
            step=module.train_state.step,
            max_steps=self._config.run.trainer.max_steps,
            status=status,
            config=self._config.to_dict(),
        )
