"""Times at which checkpoints are saved, and retention; what is in them is not decided here."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from typing import final

from nxdt_core.callback import Callback, Run
from nxdt_core.checkpoint import CheckpointManager, Manifest, Ownership
from nxdt_core.checkpoint.format.manifest import Keep
from nxdt_core.checkpoint.write.manager import SaveReport
from nxdt_core.checkpoint.write.retention import Retention, RunRetention
from nxdt_core.config import ResolvedConfig
from nxdt_core.config.schema import mode_of
from nxdt_core.config.section import seconds_of
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.run.callbacks.metrics import MetricFiles
from nxdt_core.train import build
from nxdt_core.train.loop import validates_after
from nxdt_core.train.state import SaveFacts
from nxdt_core.train.weights.export import HFForm

STEPS = 10
"""Steps before and after a save that are compared."""
SAVES_FILE = "saves.jsonl"
"""One JSON object per committed checkpoint."""
_log = logging.getLogger(__name__)
_TIME_TOPIC = "checkpoint time"
_NOT_OF_THE_RUN = (
    *("step", "consumed_", "checkpoint_", "start_", "data_wait_s", "tokens_per_s", "max_memory_bytes"),
    *("run_resumed", "compile_time_s"),
)
"""Prefixes of logged metrics that a manifest has anyway, or that describe the machine."""
_BREAKING_S = 60.0
"""Longest wait of a failing run for a save in flight."""


@dataclass(slots=True)
class _Save:
    """A save, and the times of the steps around it."""

    step: int
    before_s: float | None = None
    """Mean duration of the steps before; None where there were none."""
    after: list[float] = field(default_factory=list)
    """Durations of the steps after it, without what saves and validations took between them."""
    over: bool = False
    """True once no further step is compared."""
    report: SaveReport | None = None

    @property
    def slowdown(self) -> float | None:
        """Mean time of a step after the save over that before it, less 1; None before all are compared."""
        if not self.over or not self.after or not self.before_s:
            return None
        return sum(self.after) / len(self.after) / self.before_s - 1

    def columns(self) -> dict[str, float | int | None]:
        assert self.report is not None, "only what is committed is shown"
        return {
            "blocked_s": self.report.blocked_s,
            "seconds": self.report.seconds,
            "bytes": self.report.manifest.size_bytes,
            "gb_per_s": self.report.gigabytes_per_s,
            "slowdown": self.slowdown,
        }


class SaveMetrics:
    """Collects the reports of saves and the times of the steps around them.

    Args:
        files: of which ``saves.jsonl`` is one.
    """

    def __init__(self, files: MetricFiles) -> None:
        self._files = files
        self._before: deque[float] = deque(maxlen=STEPS)
        """Durations of the newest steps."""
        self._step_began_at: float | None = None
        self._timed: _Save | None = None
        """The save whose next steps are being timed."""
        self._pending: dict[int, _Save] = {}
        self._newest: _Save | None = None
        self._captured_at: float | None = None
        """Time of the state that the newest committed checkpoint holds, in seconds since the epoch."""

    def columns(self) -> dict[str, float | int | None]:
        """Return the columns about saves for a row of metrics; none until a checkpoint exists."""
        if self._captured_at is None:
            return {}
        newest = {} if self._newest is None else self._newest.columns()
        named = {"age_s": max(0.0, time.time() - self._captured_at), **newest}  # clocks are set, also backwards
        return {f"checkpoint_{name}": value for name, value in named.items()}

    def resumed(self, manifest: Manifest) -> None:
        """Take the age of the checkpoint from which the run resumes."""
        self._captured_at = datetime.fromisoformat(manifest.created).timestamp()

    def step_ended(self) -> None:
        """Count the time since the last call of this or of :meth:`step_began` as a step's."""
        now = time.perf_counter()
        if self._step_began_at is not None:
            seconds = now - self._step_began_at
            self._before.append(seconds)
            if self._timed is not None:
                self._timed.after.append(seconds)
                if len(self._timed.after) == STEPS:
                    self.close()
        self._step_began_at = now

    def step_began(self) -> None:
        """Leave out the time since the last step: it was a save's or a validation's."""
        self._step_began_at = time.perf_counter()

    def begun(self, step: int) -> None:
        """Note that the save of ``step`` has begun: the steps from here on are compared with those before."""
        self.close()
        self._timed = self._pending.setdefault(step, _Save(step))  # one that is not in the background is over
        self._timed.before_s = sum(self._before) / len(self._before) if self._before else None

    def saved(self, report: SaveReport) -> None:
        """Record how long a committed save took and how large it is."""
        self._captured_at = report.captured_at
        self._newest = self._pending.setdefault(report.manifest.step, _Save(report.manifest.step))
        self._newest.report = report
        self._write_complete()

    def close(self) -> None:
        """Note the end of the steps that are compared: all are there, another save begins, or the run ends."""
        if self._timed is not None:
            self._timed.over = True
            self._timed = None
            self._write_complete()

    def _write_complete(self) -> None:
        """Write the rows of checkpoints that are committed and whose next steps are over."""
        for save in [save for save in self._pending.values() if save.over and save.report is not None]:
            del self._pending[save.step]
            self._files.append(SAVES_FILE, {"step": save.step, **save.columns()})


@final
class CheckpointSaver(Callback):
    """Saves at the intervals and at the end of a run, notifies callbacks, deletes checkpoints that need not be kept."""

    def __init__(
        self,
        storage: CheckpointStore,
        config: ResolvedConfig,
        files: MetricFiles,
        ownership: Ownership | None = None,
    ) -> None:
        self._config = config.run.checkpoint
        self._storage = storage
        self.save_metrics = SaveMetrics(files)
        self._ownership = ownership
        self._retention = RunRetention(
            storage,
            Retention(
                keep_last=self._config.keep_last or 0,
                save_top_k=self._config.save_top_k,
                monitor=self._config.monitor,
                mode=mode_of(self._config.monitor, self._config.mode) or "max",
            ),
            saves_ephemeral=self._config.ephemeral_every_n_steps is not None,
        )
        interval = self._config.train_time_interval
        self._interval_s = None if interval is None else seconds_of(interval)
        self._manager: CheckpointManager | None = None
        self._saved: int | None = None
        """Step of the newest save that was begun."""
        self._saved_at = 0.0
        self._after_validation: Keep | None = None

    def on_fit_start(self, run: Run) -> None:
        """Get ready to save; a resumed step is saved already."""
        self._saved, self._saved_at = run.step, time.monotonic()
        ranks, resumed = run.session.engine.ranks, run.session.resumed
        every = self._config.hf_every_n_saves
        self._manager = CheckpointManager(
            self._storage,
            ranks=ranks,
            when_busy=self._config.when_busy,
            deadline_s=self._config.deadline_s,
            refuse_same_weights=self._config.refuse_same_weights,
            newest=resumed,
            add_files=None if every is None else HFForm(run.config, self._storage, ranks, every=every),
            before_commit=None if self._ownership is None else self._ownership.check,
            after_commit=self._prune,
            on_saved=lambda report: self._report_saved(run, report),
            signer=build.signer(run.config),
        )
        if resumed is not None:
            self._retention.resumed(resumed)
            self.save_metrics.resumed(resumed)

    def on_step_end(self, run: Run) -> None:
        """Complete a save that has ended; begin one that is due."""
        self.save_metrics.step_ended()
        self._manager_made.poll()
        due = self._due(run)
        if due is not None and self._config.monitor != "step" and validates_after(run):
            self._after_validation = due
        elif due is not None:
            self._save(run, due, without=("val_",) if validates_after(run) else ())
        self.save_metrics.step_began()

    def on_validation_end(self, run: Run) -> None:
        """Save what waited for the metrics of this validation."""
        due, self._after_validation = self._after_validation, None
        if due is not None:
            self._save(run, due)
        self.save_metrics.step_began()

    def on_fit_end(self, run: Run) -> None:
        """Save the last step (a run that was asked to stop early always does), and wait until it is committed."""
        if self._interval_s is not None:
            run.session.engine.ranks.last_answer(topic=_TIME_TOPIC)
        self._manager_made.wait()
        if self._config.save_last or run.step < run.max_steps:
            self._save(run, self._kind(run.step) or "regular")
            self._manager_made.wait()
        self.save_metrics.close()

    def close(self, run: Run) -> None:
        """Let the save in flight of a run that breaks end; what broke it may concern this rank only, so no other is
        asked."""
        if self._manager is not None and not isinstance(run.error, KeyboardInterrupt | None):
            self._manager.wait_locally(_BREAKING_S)

    @property
    def _manager_made(self) -> CheckpointManager:
        assert self._manager is not None, "made at the start of training"
        return self._manager

    def _due(self, run: Run) -> Keep | None:
        """Return the kind of checkpoint that is due at this step, the same on all ranks."""
        kind = self._kind(run.step) or ("regular" if run.save_asked else None)
        run.save_asked = False
        if self._interval_s is None:
            return kind
        # The first rank's clock decides; each rank learns the decision at the next step, and may save in between.
        ranks = run.session.engine.ranks
        over = ranks.rank == 0 and time.monotonic() - self._saved_at >= self._interval_s
        decided = ranks.largest_before(int(over), topic=_TIME_TOPIC) and self._saved != run.step - 1
        return "regular" if decided and kind is None else kind

    def _kind(self, step: int) -> Keep | None:
        intervals: tuple[tuple[int | None, Keep], ...] = (
            (self._config.permanent_every_n_steps, "permanent"),
            (self._config.every_n_train_steps, "regular"),
            (self._config.ephemeral_every_n_steps, "ephemeral"),
        )
        return next((kind for every, kind in intervals if every is not None and step % every == 0), None)

    def _save(self, run: Run, keep: Keep, *, without: tuple[str, ...] = ()) -> None:
        """Begin a save; ``without``: prefixes of metrics of an earlier step, which a list would show as this one's."""
        if run.step == self._saved:
            return
        fencing = 0 if self._ownership is None else self._ownership.fencing
        metrics = {
            name: value for name, value in run.metrics.items() if not name.startswith((*_NOT_OF_THE_RUN, *without))
        }
        about = SaveFacts(metrics=metrics, keep=keep, fencing=fencing)
        extra = {"callbacks": run.state_dict(), "horizon": run.config.run.model.optim.sched.max_steps}
        manager, background = self._manager_made, self._config.async_save
        begun = run.session.save(manager, asynchronous=background, extra=extra, about=about)
        self._saved_at = time.monotonic()
        if not begun:
            run.say(f"step {run.step}: no checkpoint, the one before is still being written")
            return
        self._saved = run.step
        self.save_metrics.begun(run.step)

    def _prune(self, manifest: Manifest) -> None:
        """Delete checkpoints after a commit, on the first rank, in the background."""
        self._retention.after_commit(manifest)
        if self._config.monitor != "step" and self._config.monitor not in manifest.facts.metrics:
            _log.warning("step %d has no metric %r to rank its checkpoint by", manifest.step, self._config.monitor)

    def _report_saved(self, run: Run, report: SaveReport) -> None:
        manifest = run.saved = report.manifest
        self.save_metrics.saved(report)
        run.say(f"step {manifest.step}: checkpoint saved to {build.step_uri(self._storage, manifest.step)} ({report})")
        run.call("on_checkpoint_saved", manifest)
