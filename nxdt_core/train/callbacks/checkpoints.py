"""When checkpoints are saved and which are kept; what is in them is not decided here."""

from __future__ import annotations

import logging
import time
from typing import final

from nxdt_core.callback import Callback, Run
from nxdt_core.checkpoint import CheckpointManager, Manifest, Ownership, Retention, SaveReport
from nxdt_core.checkpoint.format.manifest import Keep
from nxdt_core.checkpoint.write.retention import RunRetention
from nxdt_core.config import ResolvedConfig
from nxdt_core.config.fields.duration import seconds_of
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.train import build
from nxdt_core.train.callbacks.save_figures import SaveFigures
from nxdt_core.train.loop import validates_after
from nxdt_core.train.session import SaveFacts
from nxdt_core.train.weights.hf_form import HFForm

__all__ = ["CheckpointSaver"]

_log = logging.getLogger(__name__)

_TIME_TOPIC = "checkpoint time"
_NOT_OF_THE_RUN = (
    *("step", "consumed_", "checkpoint_", "start_", "data_wait_s", "tokens_per_s", "max_memory_bytes"),
    *("run_resumed", "compile_time_s"),
)
"""Prefixes of logged metrics that a manifest has anyway, or that describe the machine."""
_BREAKING_S = 60.0
"""How long a failing run waits for a save in flight."""


@final
class CheckpointSaver(Callback):
    """Saves at the intervals and at the end of a run, notifies callbacks, deletes checkpoints that need not be kept."""

    def __init__(
        self,
        storage: CheckpointStore,
        config: ResolvedConfig,
        figures: SaveFigures,
        ownership: Ownership | None = None,
    ) -> None:
        self._config = config.run.checkpoint
        self._storage = storage
        self._figures = figures
        self._ownership = ownership
        self._retention = RunRetention(
            storage,
            Retention(
                keep_last=self._config.keep_last or 0,
                save_top_k=self._config.save_top_k,
                monitor=self._config.monitor,
                mode=self._config.mode,
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
            asynchronous=self._config.async_save,
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
            self._figures.resumed(resumed)

    def on_step_end(self, run: Run) -> None:
        """Complete a save that has ended; begin one that is due."""
        self._figures.step_ended()
        self._manager_made.poll()
        due = self._due(run)
        if due is not None and self._config.monitor != "step" and validates_after(run):
            self._after_validation = due
        elif due is not None:
            self._save(run, due)
        self._figures.step_began()

    def on_validation_end(self, run: Run) -> None:
        """Save what waited for the figures of this validation."""
        due, self._after_validation = self._after_validation, None
        if due is not None:
            self._save(run, due)
        self._figures.step_began()

    def on_fit_end(self, run: Run) -> None:
        """Save the last step (a run that was asked to stop early always does), and wait until it is committed."""
        if self._interval_s is not None:
            run.session.engine.ranks.last_answer(topic=_TIME_TOPIC)
        self._manager_made.wait()
        if self._config.save_last or run.step < run.max_steps:
            self._save(run, self._kind(run.step) or "regular")
            self._manager_made.wait()
        self._figures.close()

    def close(self, run: Run) -> None:
        """Let the save in flight of a run that breaks end; what broke it may concern this rank only, so no other is
        asked."""
        if self._manager is not None and isinstance(run.error, Exception):
            self._manager.leave(_BREAKING_S)

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

    def _save(self, run: Run, keep: Keep) -> None:
        if run.step == self._saved:
            return
        fencing = 0 if self._ownership is None else self._ownership.fencing
        metrics = {name: value for name, value in run.metrics.items() if not name.startswith(_NOT_OF_THE_RUN)}
        about = SaveFacts(metrics=metrics, keep=keep, fencing=fencing)
        extra = {"callbacks": run.state_dict(), "horizon": run.session.horizon.max_steps}
        begun = run.session.begin_save(self._manager_made, extra=extra, about=about)
        self._saved_at = time.monotonic()
        if not begun:
            run.say(f"step {run.step}: no checkpoint, the one before is still being written")
            return
        self._saved = run.step
        self._figures.begun(run.step)

    def _prune(self, manifest: Manifest) -> None:
        """After a commit, on the first rank, in the background."""
        self._retention.after_commit(manifest)
        if self._config.monitor != "step" and self._config.monitor not in manifest.facts.metrics:
            _log.warning("step %d has no metric %r to rank its checkpoint by", manifest.step, self._config.monitor)

    def _report_saved(self, run: Run, report: SaveReport) -> None:
        manifest = run.saved = report.manifest
        self._figures.saved(report)
        run.say(f"step {manifest.step}: checkpoint saved to {build.step_uri(self._storage, manifest.step)} ({report})")
        run.call("on_checkpoint_saved", manifest)
