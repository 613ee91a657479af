"""Ctrl-C and SIGTERM: stop after a step or a validation's batch, with a checkpoint. A second signal stops at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, final

from nxdt_core.callback import Callback, Run
from nxdt_core.errors.base import NxdtError
from nxdt_core.train.callbacks.console import Console

if TYPE_CHECKING:
    from nxdt_core.protocols.parallel.ranks import RankAgreement

__all__ = ["StopSignals", "Supervisor"]

_VALIDATION = "signals in a validation"
_BY_CALLBACK = 1
"""In place of a signal's number, below those of the signals here."""
_SAME_REQUEST_S = 1.0
"""Two signals within this are one request among many ranks: a scheduler signals all processes of a job, and an agent
that is one of them passes its own on. A person's second Ctrl-C comes later."""


class Supervisor(Protocol):
    """What watches this rank from outside and asks it to stop: the launcher of a run of many ranks."""

    on_stop: Callable[[int], None] | None
    """Takes the number of the signal that the launcher got; None while nothing can be saved."""

    def watch(self, limit_s: float) -> None:
        """Report this rank's progress from now on; a run without any for ``limit_s`` is ended."""

    def keep_stacks_in(self, run_dir: Path) -> None:
        """Write the stacks of a run that hangs below its directory."""


@final
class StopSignals(Callback):
    """Turns signals, and the wishes of callbacks, into a clean stop; ``received`` is the signal that stopped the run.

    A signal may reach ranks at different steps, or only one rank. All ranks stop at the same step: each reports its
    signal at the end of a step and learns at the end of the next step whether any rank received one. In a validation
    the same holds of batches; what it found until then is dropped. It is the last callback of a run, so that it sees
    at the end of a step what the others ask for.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, console: Console, ranks: RankAgreement, supervisor: Supervisor | None = None) -> None:
        self._console = console
        self._ranks = ranks
        self._supervisor = supervisor
        self._before: dict[signal.Signals, Any] = {}
        self._wanted: int = 0
        self._wanted_at_s = 0.0
        self._because: str | None = None
        self.received: signal.Signals | None = None
        """The signal that all ranks stop for."""
        self.failure: NxdtError | None = None
        """Why the run cannot continue; the same on all ranks once training has ended."""

    def on_fit_start(self, run: Run) -> None:
        """Install the handlers of SIGINT and SIGTERM."""
        for number in self._SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        if self._supervisor is not None:
            self._supervisor.on_stop = self._want

    def on_step_end(self, run: Run) -> None:
        """Stop the run once a signal has reached any rank."""
        self._stop(run, self._ranks.largest_before(self._request(run)))

    def on_validation_batch_end(self, run: Run) -> None:
        """End the validation once a signal has reached any rank."""
        self._stop(run, self._ranks.largest_before(self._request(run), topic=_VALIDATION))

    def on_validation_end(self, run: Run) -> None:
        """Learn of signals during the last batch, so that no further step is trained."""
        before = self._ranks.largest_before(self._request(run), topic=_VALIDATION)
        self._stop(run, max(before, self._ranks.last_answer(topic=_VALIDATION)))

    def _request(self, run: Run) -> int:
        return self._wanted or (_BY_CALLBACK if run.stop_reason else 0)

    def _stop(self, run: Run, agreed: int) -> None:
        if not agreed or run.stopping:
            return
        run.stopping, run.status = True, "stopped"
        if agreed == _BY_CALLBACK:
            run.say(f"stopping after step {run.step}: {run.stop_reason or 'another rank asked for it'}")
            return
        self.received = signal.Signals(agreed)
        if self._ranks.world_size > 1:
            self._announce(self.received)

    def request(self, number: signal.Signals, *, because: str) -> None:
        """Stop as if the signal had reached this rank; ``because`` is the reason shown. Later requests are ignored."""
        if not self._wanted:
            self._because = because
            self._want(number)
            if self._ranks.world_size == 1:
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
        if alone:
            self._announce(signal.Signals(number))

    def _want(self, number: int) -> None:
        """Take note of a request, from a signal's handler or another thread."""
        if not self._wanted:
            self._wanted_at_s = time.monotonic()
            self._wanted = number

    def _announce(self, number: signal.Signals) -> None:
        if self._because is not None:
            self._console.say(f"{self._because}: stopping after this step")
        else:
            self._console.say(f"{number.name}: stopping after this step; another signal stops at once, without saving")
