"""Callbacks that end a run before its last step: signals, the time limit, early stopping, non-finite losses."""

from __future__ import annotations

import math
import signal
import time
from types import FrameType
from typing import TYPE_CHECKING, Any, final

from nxdt_core.callback import Callback, Run
from nxdt_core.config.schema import EarlyStoppingParams, mode_of
from nxdt_core.distributed.devices import profile_of
from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.training import MetricNotLogged, StepNotFinite
from nxdt_core.run.log import Console

if TYPE_CHECKING:
    from nxdt_core.launch.supervision.client import Client
    from nxdt_core.protocols.ranks import RankAgreement


_VALIDATION = "signals in a validation"
_BY_CALLBACK = 1
"""Value in place of a signal's number, below those of the signals here."""
_SAME_REQUEST_S = 1.0
"""Two signals within this are one request among many ranks: a scheduler signals all processes of a job, and an agent
that is one of them passes its own on. A person's second Ctrl-C comes later."""


@final
class StopSignals(Callback):
    """Turns signals, and the wishes of callbacks, into a clean stop; ``received`` is the signal that stopped the run.

    A signal may reach ranks at different steps, or only one rank. All ranks stop at the same step: each reports its
    signal at the end of a step and learns at the end of the next step whether any rank received one. In a validation
    the same holds of batches; what it found until then is dropped. It is the last callback of a run, so that it sees
    at the end of a step what the others ask for.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, console: Console, ranks: RankAgreement, supervisor: Client | None = None) -> None:
        self._console = console
        self._ranks = ranks
        self._supervisor = supervisor
        self._before: dict[signal.Signals, Any] = {}
        self._wanted: int = 0
        self._wanted_at_s = 0.0
        self._because: str | None = None
        self._announced = False
        self.received: signal.Signals | None = None
        """The signal that all ranks stop for."""
        self.failure: NxdtError | None = None
        """Reason why the run cannot continue; the same on all ranks once training has ended."""

    def on_fit_start(self, run: Run) -> None:
        """Install the handlers of SIGINT and SIGTERM."""
        for number in self._SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        if self._supervisor is not None:
            self._supervisor.on_stop = self._want

    def on_step_end(self, run: Run, topic: str = "", *, last: bool = False) -> None:
        """Stop the run once a signal has reached any rank."""
        agreed = self._ranks.largest_before(self._wanted or (_BY_CALLBACK if run.stop_reason else 0), topic=topic)
        if last:
            agreed = max(agreed, self._ranks.last_answer(topic=topic))
        if not agreed or run.stopping:
            return
        run.stopping, run.status = True, "stopped"
        if agreed == _BY_CALLBACK:
            run.say(f"stopping after step {run.step}: {run.stop_reason or 'another rank asked for it'}")
            return
        self.received = signal.Signals(agreed)
        self._announce(self.received)

    def on_validation_batch_end(self, run: Run) -> None:
        """End the validation once a signal has reached any rank."""
        self.on_step_end(run, _VALIDATION)

    def on_validation_end(self, run: Run) -> None:
        """Learn of signals during the last batch, so that no further step is trained."""
        self.on_step_end(run, _VALIDATION, last=True)

    def request(self, number: signal.Signals, *, because: str) -> None:
        """Stop as if the signal had reached this rank; ``because`` is the reason shown. Later requests are ignored."""
        if not self._wanted:
            self._because = because
            self._want(number)
            self._announce(number)

    def fail(self, error: NxdtError) -> None:
        """Stop after this step, with a checkpoint, for ``error`` on the first rank: what was trained is not lost."""
        self.failure = self.failure or error
        self.request(signal.SIGTERM, because=error.what().rstrip("."))

    def on_fit_end(self, run: Run) -> None:
        """Complete pending communication between the ranks, and agree on what failed."""
        self._ranks.last_answer()
        self._ranks.last_answer(topic=_VALIDATION)
        self.failure = self._ranks.broadcast_object(self.failure)

    def close(self, run: Run) -> None:
        """Restore the signal handlers from before."""
        if self._supervisor is not None:
            self._supervisor.on_stop = None
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        alone = self._ranks.world_size == 1
        if self._wanted and (alone or time.monotonic() - self._wanted_at_s > _SAME_REQUEST_S):
            raise KeyboardInterrupt
        self._want(number)
        self._announce(signal.Signals(number))

    def _want(self, number: int) -> None:
        """Take note of a request, from a signal's handler or another thread."""
        if not self._wanted:
            self._wanted_at_s = time.monotonic()
            self._wanted = number

    def _announce(self, number: signal.Signals) -> None:
        """Say once why the run stops: at the signal, since the step may take long, or when another rank got it."""
        if self._announced:
            return
        self._announced = True
        if self._because is not None:
            self._console.say(f"{self._because}: stopping after this step")
        else:
            self._console.say(f"{number.name}: stopping after this step; another signal stops at once, without saving")


@final
class EarlyStop(Callback):
    """Judges a metric after each validation; all ranks stop where one would.

    Args:
        params: the section ``early_stopping_callback_params``.
        min_steps: steps before which it does not stop the run.
    """

    def __init__(self, params: EarlyStoppingParams, *, min_steps: int = 0) -> None:
        self._params = params
        self._min_steps = min_steps
        self._mode = mode_of(params.monitor, params.mode)
        self._sign = 1.0 if self._mode == "min" else -1.0
        self._best: float | None = None
        self._waited = 0
        """Validations since the best one."""

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen, of the metric that is judged."""
        return {"monitor": self._params.monitor, "mode": self._mode, "best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was seen, unless another metric is judged now."""
        if (state["monitor"], state["mode"]) == (self._params.monitor, self._mode):
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


@final
class TimeLimit(Callback):
    """Asks for a stop as SIGTERM would, once ``limit_s`` have passed since it was made.

    The first rank's clock decides for all. A resumed run has the whole limit again: else the second of two jobs with
    the same limit would stop at once.

    Args:
        limit_s: seconds.
        signals: stops the run.
    """

    def __init__(self, limit_s: float, signals: StopSignals) -> None:
        self._ends_at_s = time.monotonic() + limit_s
        self._signals = signals

    def on_step_end(self, run: Run) -> None:
        """Look at the clock as during a validation."""
        self.on_validation_batch_end(run)

    def on_validation_batch_end(self, run: Run) -> None:
        """Look at the clock, unless the run ends here anyway."""
        if run.rank == 0 and time.monotonic() >= self._ends_at_s and run.step < run.max_steps:
            self._signals.request(signal.SIGTERM, because="trainer.max_time is over")


@final
class NonFiniteGuard(Callback):
    """Ends a run with an error after a step that was left out.

    The count of such steps is on the device. It is read every ``trainer.log_every_n_steps`` steps, when the metrics
    wait for the device anyway, and after each step where that costs no wait. Until then such steps change nothing.
    """

    def on_step_end(self, run: Run) -> None:
        """Look, where it is time to.

        Raises:
            StepNotFinite: on all ranks.
        """
        session, result = run.session, run.last
        every = run.config.run.trainer.log_every_n_steps
        looks = run.step % every == 0 or run.step == run.max_steps or profile_of(session.engine.device).host
        skipped = int(session.optimizer.skipped_steps) if looks else 0
        if skipped and result is not None:
            loss, norm = float(result.loss.loss), float(result.grad_norm)
            raise StepNotFinite(step=run.step, skipped=skipped, loss=loss, grad_norm=norm)
