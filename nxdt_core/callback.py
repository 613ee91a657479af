"""Kind ``callback``: what takes part in a run without being the step: reports, loggers, averages, early ends.

The target of the kind is a subclass of :class:`Callback`, called as ``Target(config, run_dir)`` on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from nxdt_core.errors import NxdtError

_log = logging.getLogger(__name__)

_PERFORMANCE = ("tokens_per_s", "mfu", "mfu_palm", "data_wait_s", "step_time_s", "max_memory_bytes", "compile_time_s")
_TAGS = {"checkpoint_blocked_s": "checkpoint/stall_s", **{name: f"perf/{name}" for name in _PERFORMANCE}}
_GROUPS = {"val_": "val/", "checkpoint_": "checkpoint/", "run_": "run/", "start_": "start/"}


class Callback:
    """Called at the moments of a run, on every rank at the same ones; override what you need.

    What a method ``on_…`` or ``close`` raises is logged with the callback's name, and the run continues without the
    callback. An :class:`nxdt_core.errors.NxdtError` ends the run instead, as does any error of the constructor, of
    :meth:`state_dict` or of :meth:`load_state_dict`: the run could not be resumed. A method that communicates between
    ranks must do so on all of them.

    Args:
        config: dataclass of the callback's entry in the configuration; None where the component declares none.
        run_dir: directory of the run, which exists.
    """

    def __init__(self, config: Any = None, run_dir: Path | None = None) -> None:
        """Do nothing with them."""

    def on_fit_start(self, run: Run) -> None:
        """Model, optimizer and data are there, and a checkpoint is loaded; the first step comes next."""

    def on_step_end(self, run: Run) -> None:
        """An optimizer step is done, and ``run.step`` counts it."""

    def on_validation_batch_end(self, run: Run) -> None:
        """A batch of a validation is done."""

    def on_validation_end(self, run: Run) -> None:
        """A validation is complete, and ``run.metrics`` has its metrics. One that a stop cut short never is."""

    def on_log(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Figures were logged, on the rank that logged them; after ``run.step`` steps.

        ``metrics`` has them by tag, grouped as loggers show them: ``train/loss``, ``val/loss``, ``perf/tokens_per_s``.
        """

    def on_text(self, run: Run, name: str, text: str) -> None:
        """A text in Markdown was logged under ``name``, on the rank that logged it."""

    def on_checkpoint_saved(self, run: Run, manifest: Any) -> None:
        """A checkpoint is committed; with ``checkpoint.async_save`` some steps after its own.

        ``manifest`` is the checkpoint's :class:`nxdt_core.checkpoint.Manifest`.
        """

    def on_fit_end(self, run: Run) -> None:
        """Training ended in order: its last step is done, or the run was asked to stop (``run.status``)."""

    def close(self, run: Run) -> None:
        """The run ends, also after an error (``run.status`` is ``failed``): let go of files, threads and the like."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this callback, JSON-able values with tensors as leaves."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned before the checkpoint; called before :meth:`on_fit_start`."""


MOMENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))
"""Methods that a run calls, in addition to ``close`` and those of the state."""


def uncalled_methods(callback: Callback) -> list[str]:
    """Return the methods of a callback that look like moments of a run, and that no run calls."""
    return [name for name in dir(callback) if name.startswith("on_") and name not in MOMENTS]


class Run:
    """A training run, as its callbacks see it on one rank, and what they may ask of it.

    Args:
        session: the :class:`nxdt_core.train.TrainSession`, which has model, optimizer, data, state and engine.
        say: prints a line on the first rank.
        callbacks: in the order in which they are called, by the names under which a checkpoint keeps their state.
        observers: names of the callbacks without which a run can continue.
    """

    def __init__(
        self,
        session: Any,
        say: Callable[[str], None],
        callbacks: Mapping[str, Callback],
        observers: frozenset[str] = frozenset(),
    ) -> None:
        self.session = session
        self.say = say
        self.callbacks = dict(callbacks)
        self._observers = observers
        self.metrics: dict[str, float] = {}
        """The newest value of each figure that was logged, by its plain name: ``loss``, ``lr``, ``val_loss``."""
        self.last: Any = None
        """The :class:`nxdt_core.train.step.StepResult` of the newest step of this process, None before it; its
        tensors are on the device."""
        self.validation: dict[str, Any] = {}
        """Figures of the newest validation, of all its data, and of each set under ``sets`` where there are several."""
        self.saved: Any = None
        """The :class:`nxdt_core.checkpoint.Manifest` of the newest checkpoint of this process; None before it."""
        self.waited_s = 0.0
        """Seconds that training has waited for data so far."""
        self.status: Literal["running", "finished", "stopped", "failed"] = "running"
        self.error: BaseException | None = None
        """Exception that ended the run."""
        self.stop_reason: str | None = None
        """Reason for which a callback of this rank asked for the run's end."""
        self.stopping = False
        """True if all ranks have agreed to end the run; no step follows."""
        self.save_asked = False

    @property
    def config(self) -> Any:
        """The :class:`nxdt_core.config.ResolvedConfig` of the run."""
        return self.session.config

    @property
    def step(self) -> int:
        """Optimizer steps done, counted over resumes."""
        return int(self.session.state.step)

    @property
    def max_steps(self) -> int:
        """The last step of the run."""
        return int(self.config.run.trainer.max_steps)

    @property
    def rank(self) -> int:
        """Number of this process among those of the run; 0 is the one that writes logs and files."""
        return int(self.session.engine.ranks.rank)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Give metrics to the loggers, and to callbacks that monitor one of them.

        Args:
            metrics: by name. Names without a slash are grouped as those of nxdt: ``loss`` as ``train/loss``, names that
                begin with ``val_`` under ``val/``.
        """
        self.metrics.update(metrics)
        self.call("on_log", {tag(name): value for name, value in metrics.items()})

    def log_text(self, name: str, text: str) -> None:
        """Give a text in Markdown to the loggers that show texts."""
        self.call("on_text", name, text)

    def stop(self, reason: str) -> None:
        """End the run in order, with a checkpoint. One rank is enough: all end after the same step, which on several
        ranks is the one after this."""
        self.stop_reason = self.stop_reason or reason

    def save(self) -> None:
        """Save a checkpoint after this step; called on all ranks. It has no effect where ``checkpoint.enabled`` is
        false."""
        self.save_asked = True

    def call(self, moment: str, *arguments: Any) -> None:
        """Call a method of each callback; those that observe, and fail, are named and not called again."""
        for name, callback in list(self.callbacks.items()):
            if name not in self.callbacks:  # it has failed in a call within this one
                continue
            try:
                getattr(callback, moment)(self, *arguments)
            except (NxdtError, KeyboardInterrupt):
                raise
            except BaseException as error:  # SystemExit, too
                if name not in self._observers:
                    raise
                cause = error
                while cause.__cause__ is not None:  # TensorBoard's own message speaks of the value
                    cause = cause.__cause__
                reason = f"{type(cause).__name__}: {cause}"
                trace = None if isinstance(error, OSError) else error  # a fault of its program keeps the traceback
                message = "step %d: %s failed in %s, and the run continues without it: %s"
                _log.warning(message, self.step, name, moment, reason, exc_info=trace)
                del self.callbacks[name]
                if moment != "close":
                    with suppress(Exception, SystemExit):
                        callback.close(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the callbacks that have one, for a checkpoint."""
        states = {name: callback.state_dict() for name, callback in self.callbacks.items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Give the callbacks the state that a checkpoint has of them; the others start without state."""
        for name, callback in self.callbacks.items():
            if name in states:
                callback.load_state_dict(states[name])


def tag(name: str) -> str:
    """Return the tag under which loggers have a figure: ``train/loss``, ``val/loss``, ``perf/tokens_per_s``."""
    if name in _TAGS:
        return _TAGS[name]
    for prefix, group in _GROUPS.items():
        if name.startswith(prefix):
            return group + name.removeprefix(prefix)
    return name if "/" in name else f"train/{name}"
