"""Ctrl-C and SIGTERM: stop after a step or a validation's batch, with a checkpoint. A second signal stops at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import pytorch_lightning as pl

from nxdt_core.errors.training import CannotWriteRunDirectory
from nxdt_core.training.callbacks.console import Console

if TYPE_CHECKING:
    from nxdt_core.protocols.parallel.ranks import RankAgreement

__all__ = ["StopSignals", "Supervisor"]

_VALIDATION = "signals in a validation"
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


class StopSignals(pl.Callback):
    """Turns signals into a clean stop; ``received`` is the signal that stopped the run.

    A signal may reach ranks at different steps, or only one rank. All ranks stop at the same step: each reports its
    signal at the end of a step and learns at the end of the next step whether any rank received one. In a validation
    the same holds of batches; what it found until then is dropped.

    Lightning installs its own handlers, which would raise in the middle of a step. Ours are set after them and removed
    after the fit.
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
        self.failure: CannotWriteRunDirectory | None = None
        """Why the run cannot continue; the same on all ranks once training has ended."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the handlers of SIGINT and SIGTERM."""
        for number in self._SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        if self._supervisor is not None:
            self._supervisor.on_stop = self._want

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask the trainer to stop once a signal has reached any rank."""
        self._stop(trainer, self._ranks.largest_before(self._wanted))

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """End the validation once a signal has reached any rank. Lightning also begins one because a run stops.

        Raises:
            StopIteration: which Lightning's loop takes as the end of the data.
        """
        if not trainer.sanity_checking:
            self._stop(trainer, self._ranks.largest_before(self._wanted, topic=_VALIDATION))
            if self.received is not None:
                raise StopIteration

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Learn of signals during the last batch, so that no further step is trained."""
        if not trainer.sanity_checking:
            before = self._ranks.largest_before(self._wanted, topic=_VALIDATION)
            self._stop(trainer, max(before, self._ranks.last_answer(topic=_VALIDATION)))

    def _stop(self, trainer: pl.Trainer, agreed: int) -> None:
        if agreed and self.received is None:
            self.received = signal.Signals(agreed)
            if self._ranks.world_size > 1:
                self._announce(self.received)
            trainer.should_stop = True

    def request(self, number: signal.Signals, *, because: str) -> None:
        """Stop as if the signal had reached this rank; ``because`` is the reason shown. Later requests are ignored."""
        if not self._wanted:
            self._because = because
            self._want(number)
            if self._ranks.world_size == 1:
                self._announce(number)

    def fail(self, error: CannotWriteRunDirectory) -> None:
        """Stop after this step, with a checkpoint, for ``error`` on the first rank: what was trained is not lost."""
        self.failure = self.failure or error
        self.request(signal.SIGTERM, because=f"{error.path} cannot be written ({error.reason})")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Complete pending communication between the ranks, and agree on what failed."""
        self._ranks.last_answer()
        self.failure = self._ranks.broadcast_object(self.failure)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore the signal handlers from before, where Lightning has not: its own would hold the model for good."""
        if self._supervisor is not None:
            self._supervisor.on_stop = None
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:
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
