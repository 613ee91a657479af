"""When checkpoints are saved and which are kept; what is in them is not decided here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl

from nxdt_core import checkpoint
from nxdt_core.config import ResolvedConfig
from nxdt_core.kernel.contexts import CheckpointContext
from nxdt_core.protocols.checkpoint_storage import CheckpointStorage
from nxdt_core.training import assemble
from nxdt_core.training.callbacks.console import Console

if TYPE_CHECKING:
    from nxdt_core.training.module import NxdtModule

__all__ = ["CheckpointSaver"]


class CheckpointSaver(pl.Callback):
    """Saves at the interval and at the end of a run, tells the plugins, deletes what need not be kept."""

    def __init__(self, storage: CheckpointStorage, console: Console, config: ResolvedConfig) -> None:
        wanted = config.run.checkpoint
        self._storage = storage
        self._console = console
        self._hooks = config.kernel.hooks
        self._every = wanted.every_n_train_steps
        self._save_last = wanted.save_last
        self._keep = -1 if wanted.save_top_k < 0 else max(wanted.save_top_k, wanted.keep_last or 1)
        self._saved: int | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """A resumed step is saved already."""
        self._saved = pl_module.train_state.step
        if pl_module.resumed is not None:
            self._hooks.nxdt_checkpoint_loaded(self._context(pl_module, pl_module.resumed))

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: NxdtModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save at the interval."""
        if self._every is not None and pl_module.train_state.step % self._every == 0:
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: NxdtModule) -> None:  # type: ignore[override]
        """Save the last step; a run that was asked to stop early always saves."""
        if self._save_last or pl_module.train_state.step < trainer.max_steps:
            self._save(trainer, pl_module)

    def _save(self, trainer: pl.Trainer, module: NxdtModule) -> None:
        step = module.train_state.step
        if step == self._saved:
            return
        uri = assemble.step_uri(self._storage, step)
        trainer.save_checkpoint(uri)
        self._saved = step
        if self._keep > 0 and trainer.is_global_zero:
            checkpoint.prune(self._storage, keep_last=self._keep, deep=False)
        assert module.saved is not None, "the strategy saves through the module"
        self._console.say(f"step {step}: checkpoint saved to {uri}")
        self._hooks.nxdt_checkpoint_saved(self._context(module, module.saved))

    def _context(self, module: NxdtModule, manifest: checkpoint.Manifest) -> CheckpointContext:
        return CheckpointContext(
            step=manifest.step,
            uri=assemble.step_uri(self._storage, manifest.step),
            size_bytes=manifest.size_bytes,
            consumed_samples=module.train_state.consumed_samples,
            rank=module.engine.rank_info.rank,
        )
