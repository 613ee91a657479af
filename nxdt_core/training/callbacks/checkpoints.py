"""When checkpoints are saved and which are kept; what is in them is not decided here."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl

from nxdt_core.checkpoint import CheckpointManager, Manifest, Ownership, Retention, SaveReport
from nxdt_core.checkpoint.format.manifest import Keep
from nxdt_core.checkpoint.write.run_retention import RunRetention
from nxdt_core.config import ResolvedConfig
from nxdt_core.config.fields.duration import seconds_of
from nxdt_core.kernel.contexts import CheckpointContext
from nxdt_core.protocols.checkpoint_storage import CheckpointStorage
from nxdt_core.training import build
from nxdt_core.training.callbacks.console import Console
from nxdt_core.training.callbacks.metrics import MetricsWriter
from nxdt_core.training.callbacks.save_figures import SaveFigures
from nxdt_core.training.lightning.managed_save import ManagedSave
from nxdt_core.training.session import SaveFacts
from nxdt_core.training.weights.hf_form import HFForm

if TYPE_CHECKING:
    from nxdt_core.training.lightning.module import NxdtModule

__all__ = ["CheckpointSaver"]

_log = logging.getLogger(__name__)

_TIME_TOPIC = "checkpoint time"
_NOT_OF_THE_RUN = ("step", "consumed_", "checkpoint_", "start_", "data_wait_s", "tokens_per_s", "max_memory_bytes")
"""Prefixes of logged metrics that a manifest has anyway, or that describe the machine."""
_BREAKING_S = 60.0
"""How long a failing run waits for a save in flight."""


class CheckpointSaver(pl.Callback):
    """Saves at the intervals and at the end of a run, notifies plugins, deletes checkpoints that need not be kept."""

    def __init__(
        self,
        storage: CheckpointStorage,
        console: Console,
        config: ResolvedConfig,
        metrics: MetricsWriter,
        figures: SaveFigures,
        ownership: Ownership | None = None,
    ) -> None:
        self._config = config.run.checkpoint
        self._storage = storage
        self._console = console
        self._hooks = config.kernel.hooks
        self._metrics = metrics
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

    def on_train_start(self, trainer: pl.Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """Get ready to save; a resumed step is saved already."""
        self._saved, self._saved_at = pl_module.train_state.step, time.monotonic()
        self._manager = CheckpointManager(
            self._storage,
            ranks=pl_module.engine.ranks,
            asynchronous=self._config.async_save,
            when_busy=self._config.when_busy,
            deadline_s=self._config.deadline_s,
            refuse_same_weights=self._config.refuse_same_weights,
            newest=pl_module.resumed,
            add_files=self._hf_form(pl_module),
            before_commit=None if self._ownership is None else self._ownership.check,
            after_commit=self._prune,
            on_saved=lambda report: self._report_saved(pl_module, report),
            signer=build.signer(pl_module.config),
        )
        if pl_module.resumed is not None:
            self._retention.resumed(pl_module.resumed)
            self._figures.resumed(pl_module.resumed)
            self._hooks.nxdt_checkpoint_loaded(self._context(pl_module.resumed, pl_module))

    def _hf_form(self, pl_module: NxdtModule) -> HFForm | None:
        every = self._config.hf_every_n_saves
        if every is None:
            return None
        return HFForm(pl_module.config, self._storage, pl_module.engine.ranks, every=every)

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: NxdtModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Complete a save that has ended; begin one that is due."""
        self._figures.step_ended()
        self._manager_made.poll()
        due = self._due(pl_module)
        if due is not None and self._config.monitor != "step" and _validates_now(trainer):
            self._after_validation = due
        elif due is not None:
            self._save(trainer, pl_module, due)
        self._figures.step_began()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """Save what waited for the figures of this validation."""
        due, self._after_validation = self._after_validation, None
        if due is not None:
            self._save(trainer, pl_module, due)
        self._figures.step_began()

    def on_train_end(self, trainer: pl.Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """Save the last step (a run that was asked to stop early always does), and wait until it is committed."""
        if self._interval_s is not None:
            pl_module.engine.ranks.last_answer(topic=_TIME_TOPIC)
        self._manager_made.wait()
        if self._config.save_last or pl_module.train_state.step < trainer.max_steps:
            self._save(trainer, pl_module, self._kind(pl_module.train_state.step) or "regular")
            self._manager_made.wait()
        self._figures.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Let the save in flight end; what broke the run may concern this rank only, so no other is asked."""
        if self._manager is not None and not isinstance(exception, KeyboardInterrupt):
            self._manager.leave(_BREAKING_S)

    @property
    def _manager_made(self) -> CheckpointManager:
        assert self._manager is not None, "made at the start of training"
        return self._manager

    def _due(self, module: NxdtModule) -> Keep | None:
        """Return the kind of checkpoint that is due at this step, the same on all ranks."""
        kind = self._kind(module.train_state.step)
        if self._interval_s is None:
            return kind
        # The first rank's clock decides; each rank learns the decision at the next step, and may save in between.
        ranks = module.engine.ranks
        over = ranks.rank == 0 and time.monotonic() - self._saved_at >= self._interval_s
        decided = ranks.largest_before(int(over), topic=_TIME_TOPIC) and self._saved != module.train_state.step - 1
        return "regular" if decided and kind is None else kind

    def _kind(self, step: int) -> Keep | None:
        intervals: tuple[tuple[int | None, Keep], ...] = (
            (self._config.permanent_every_n_steps, "permanent"),
            (self._config.every_n_train_steps, "regular"),
            (self._config.ephemeral_every_n_steps, "ephemeral"),
        )
        return next((kind for every, kind in intervals if every is not None and step % every == 0), None)

    def _save(self, trainer: pl.Trainer, module: NxdtModule, keep: Keep) -> None:
        step = module.train_state.step
        if step == self._saved:
            return
        fencing = 0 if self._ownership is None else self._ownership.fencing
        about, begun = SaveFacts(metrics=self._metrics_now(trainer), keep=keep, fencing=fencing), time.monotonic()
        managed = ManagedSave(manager=self._manager_made, about=about)
        trainer.save_checkpoint(build.step_uri(self._storage, step), storage_options=managed)
        if not managed.begun:
            self._console.say(f"step {step}: no checkpoint, the one before is still being written")
            self._saved_at = time.monotonic()
            return
        self._saved, self._saved_at = step, time.monotonic()
        self._manager_made.note_wait(self._saved_at - begun - managed.took_s)
        self._figures.begun(step)

    def _metrics_now(self, trainer: pl.Trainer) -> dict[str, float]:
        """The newest value of everything that was logged of the run itself."""
        found = {**self._metrics.last, **trainer.callback_metrics}
        return {
            name: float(value)
            for name, value in found.items()
            if value is not None and not name.startswith(_NOT_OF_THE_RUN)
        }

    def _prune(self, manifest: Manifest) -> None:
        """After a commit, on the first rank, in the background."""
        self._retention.after_commit(manifest)
        if self._config.monitor != "step" and self._config.monitor not in manifest.facts.metrics:
            _log.warning("step %d has no metric %r to rank its checkpoint by", manifest.step, self._config.monitor)

    def _report_saved(self, module: NxdtModule, report: SaveReport) -> None:
        manifest = module.saved = report.manifest
        self._figures.saved(report)
        self._console.say(
            f"step {manifest.step}: checkpoint saved to {build.step_uri(self._storage, manifest.step)} ({report})"
        )
        self._hooks.nxdt_checkpoint_saved(self._context(manifest, module))

    def _context(self, manifest: Manifest, module: NxdtModule) -> CheckpointContext:
        return CheckpointContext(
            step=manifest.step,
            uri=build.step_uri(self._storage, manifest.step),
            size_bytes=manifest.size_bytes,
            consumed_samples=manifest.facts.consumed_samples,
            metrics=manifest.facts.metrics,
            rank=module.engine.rank_info.rank,
        )


def _validates_now(trainer: pl.Trainer) -> bool:
    """Whether a validation follows this step."""
    every, steps = trainer.val_check_batch, trainer.fit_loop.epoch_loop.total_batch_idx + 1
    return bool(trainer.enable_validation and every) and steps % (every or 1) == 0
