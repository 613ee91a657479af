"""Early stopping: Lightning's, with messages of the run, and state that survives a resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import EarlyStopping

from nxdt_core.config.schema.exp_manager import EarlyStoppingParams
from nxdt_core.errors.training import MetricNotLogged
from nxdt_core.training.callbacks.console import Console
from nxdt_core.training.callbacks.validation_figures import validated_all

if TYPE_CHECKING:
    from nxdt_core.training.lightning.module import NxdtModule

__all__ = ["EarlyStop"]


class EarlyStop(EarlyStopping):
    """Judges a metric after each validation; all ranks stop where one would.

    Args:
        params: what is judged, and how.
        console: where the reason of the stop is printed.
        min_steps: steps before which it does not stop the run.
    """

    def __init__(self, params: EarlyStoppingParams, console: Console, *, min_steps: int = 0) -> None:
        super().__init__(
            monitor=params.monitor,
            min_delta=params.min_delta,
            patience=params.patience,
            mode=params.mode,
            strict=params.strict,
            check_finite=params.check_finite,
            stopping_threshold=params.stopping_threshold,
            divergence_threshold=params.divergence_threshold,
            check_on_train_epoch_end=False,
        )
        self._console = console
        self._min_steps = min_steps

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what was seen, not how long to wait: that is the configuration's."""
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_train_start(self, trainer: Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """Stop a run that is resumed after it was stopped."""
        if self.wait_count >= self.patience and pl_module.train_state.step >= self._min_steps:
            self._console.say(f"early stopping: {self.monitor} had not improved in {self.wait_count} validations")
            trainer.should_stop = True

    def on_validation_end(self, trainer: Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """Stop the run where the monitored metric has not improved for ``patience`` validations, after the least
        length.

        Raises:
            MetricNotLogged: there is no such metric.
        """
        if trainer.sanity_checking or not validated_all(trainer):
            return
        if self.strict and self.monitor not in trainer.callback_metrics:
            raise MetricNotLogged(metric=self.monitor, known=sorted(trainer.callback_metrics))
        asked_before = trainer.should_stop
        super().on_validation_end(trainer, pl_module)
        if asked_before or not trainer.should_stop:
            return
        step = pl_module.train_state.step
        if step < self._min_steps:
            trainer.should_stop = False
            return
        why = (self.stopping_reason_message or "another rank stops").removesuffix(" Signaling Trainer to stop.")
        self._console.say(f"step {step}: early stopping. {why}")
