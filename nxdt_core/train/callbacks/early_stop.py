"""Early stopping: the run ends once a metric has stopped improving. Its state survives a resume."""

from __future__ import annotations

import math
from typing import Any, final

from nxdt_core.callback import Callback, Run
from nxdt_core.config.schema.exp_manager import EarlyStoppingParams
from nxdt_core.errors.training import MetricNotLogged

__all__ = ["EarlyStop"]


@final
class EarlyStop(Callback):
    """Judges a metric after each validation; all ranks stop where one would.

    Args:
        params: what is judged, and how.
        min_steps: steps before which it does not stop the run.
    """

    def __init__(self, params: EarlyStoppingParams, *, min_steps: int = 0) -> None:
        self._params = params
        self._min_steps = min_steps
        self._sign = 1.0 if params.mode == "min" else -1.0
        self._best: float | None = None
        self._waited = 0
        """Validations since the best one."""

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen, of the metric that is judged."""
        judged = {"monitor": self._params.monitor, "mode": self._params.mode}
        return {**judged, "best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was seen, unless another metric is judged now."""
        if (state["monitor"], state["mode"]) == (self._params.monitor, self._params.mode):
            self._best, self._waited = state["best"], state["waited"]

    def on_fit_start(self, run: Run) -> None:
        """Stop a run that is resumed after it was stopped."""
        if self._waited >= self._params.patience and run.step >= self._min_steps:
            run.say(f"early stopping: {self._params.monitor} had not improved in {self._waited} validations")
            run.stopping = True

    def on_validation_end(self, run: Run) -> None:
        """Stop the run where the metric has not improved for ``patience`` validations, after the least length.

        Raises:
            MetricNotLogged: there is no such metric.
        """
        name, value = self._params.monitor, run.metrics.get(self._params.monitor)
        if value is None:
            if self._params.strict:
                raise MetricNotLogged(metric=name, known=sorted(run.metrics))
            return
        why = self._judge(value)
        stops = run.session.engine.ranks.any_rank(why is not None) and run.step >= self._min_steps
        if stops and not run.stopping:
            run.stopping = True
            run.say(f"step {run.step}: early stopping. {why or 'another rank stops'}")

    def _judge(self, value: float) -> str | None:
        """Return why the run ends with this value; None where it continues."""
        params, sign = self._params, self._sign
        best = math.inf * sign if self._best is None else self._best
        if params.check_finite and not math.isfinite(value):
            return f"{params.monitor} is {value}"
        if params.stopping_threshold is not None and sign * value < sign * params.stopping_threshold:
            return f"{params.monitor} is {value:.6g}, better than stopping_threshold {params.stopping_threshold}"
        if params.divergence_threshold is not None and sign * value > sign * params.divergence_threshold:
            return f"{params.monitor} is {value:.6g}, worse than divergence_threshold {params.divergence_threshold}"
        if sign * value < sign * best - params.min_delta:  # never so for NaN
            self._best, self._waited = value, 0
            return None
        self._waited += 1
        if self._waited < params.patience:
            return None
        return f"{params.monitor} has not improved in {self._waited} validations (best: {best:.6g})"
