"""Lightning's module over the primitives: one ``training_step`` is one optimizer step on one global batch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from nxdt_core.checkpoint import Manifest
from nxdt_core.checkpoint.formats.installed import format_of
from nxdt_core.checkpoint.hf.source import read_hf_source
from nxdt_core.config import ResolvedConfig
from nxdt_core.data.digest import digest
from nxdt_core.errors.training import NotOurBatch, NotOurStrategy
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.checkpoint_storage import CheckpointStorage
from nxdt_core.protocols.objective import traits_of
from nxdt_core.protocols.parallel.engine import ParallelEngine
from nxdt_core.protocols.parallel.model import ParallelModel, ParallelOptimizer, StepLoss
from nxdt_core.protocols.parallel.piece import Piece
from nxdt_core.training import build, primitives
from nxdt_core.training.callbacks.validation_figures import UNNAMED, ValidationFigures, scalars
from nxdt_core.training.hidden_state import watch_objective
from nxdt_core.training.lightning.managed_save import ManagedSave
from nxdt_core.training.lightning.step_input import StepInput
from nxdt_core.training.state import TrainState, seed_all
from nxdt_core.training.weights.average import WeightAverage
from nxdt_core.training.weights.reference import check_base_frozen, with_base
from nxdt_core.training.weights.shape_mismatch import misfit_explained

__all__ = ["NxdtModule"]


class NxdtModule(pl.LightningModule):
    """The configured model, objective, optimizer and schedule; needs ``NxdtStrategy`` in the ``Trainer``.

    Args:
        config: the run.
        logs_metrics: log figures as Lightning modules do, so that loggers get them and ``EarlyStopping`` and
            ``ModelCheckpoint`` can monitor them: ``loss``, ``grad_norm`` and ``lr`` of each training step, and
            ``val_loss``, its perplexity and metrics of each validation (``test_…`` of ``trainer.test``). The run of
            ``nxdt train`` has a callback for that.
    """

    model: ParallelModel
    optimizer: ParallelOptimizer
    last: primitives.StepResult
    """Result of the newest training step."""

    def __init__(self, config: ResolvedConfig, *, logs_metrics: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self._logs_metrics = logs_metrics
        self._figures: ValidationFigures | None = None
        self.train_state = TrainState()
        self.objective = build.objective(config)
        self.horizon = build.schedule_horizon(config)
        self.schedule = build.schedule(config)
        ema = config.run.exp_manager.ema
        self.average = WeightAverage(ema) if ema.enable else None
        self._unaveraged: dict[str, Piece] | None = None
        """The weights, while their average is validated in their place."""
        self.saved: Manifest | None = None
        """The newest checkpoint of this process."""
        self.resumed: Manifest | None = None
        """The checkpoint that this run went on from."""
        self.resumed_horizon: int | None = None
        """Last step of the schedule that it was trained with."""
        self._refers = traits_of(self.objective).reference == "step"
        self._resume: tuple[CheckpointStorage, Manifest] | None = None
        self._weights_only: tuple[CheckpointStorage, Manifest] | None = None
        self._foreign: Path | None = None

    @property
    def engine(self) -> ParallelEngine:
        """Return the strategy's engine.

        Raises:
            NotOurStrategy: the ``Trainer`` has a strategy without one.
        """
        engine: ParallelEngine | None = getattr(self.trainer.strategy, "engine", None)
        if engine is None:
            raise NotOurStrategy(found=type(self.trainer.strategy).__name__)
        return engine

    def start_from(self, storage: CheckpointStorage, manifest: Manifest) -> None:
        """Begin a new run with the weights of a checkpoint (``model.weight_init_only``)."""
        self._weights_only = (storage, manifest)

    def start_from_foreign(self, path: Path) -> None:
        """Begin a new run with the weights of another program's checkpoint."""
        self._foreign = path

    def resume_from(self, storage: CheckpointStorage, manifest: Manifest) -> None:
        """Go on from a checkpoint once model and optimizer exist; called by the strategy."""
        self._resume = (storage, manifest)

    def configure_model(self) -> None:
        """Build the model, unless it is there already."""
        if hasattr(self, "model"):
            return
        seed_all(self.config.run.seed)
        loads = any(source is not None for source in (self._resume, self._weights_only, self._foreign))
        strict = self.config.run.checkpoint.strict
        fresh = not (loads and strict)  # what a checkpoint lacks keeps what it began with
        if self._resume is not None and self._resume[1].facts.without_base:
            fresh = self._weights_only is None and self._foreign is None
        self.model = primitives.initialize_parallel_model(self.config, self.engine, materialise=fresh)
        if self._weights_only is not None:
            storage, manifest = self._weights_only
            with misfit_explained(self.config, manifest):
                primitives.load_checkpoint(storage, manifest, engine=self.engine, model=self.model, strict=strict)
        if self._foreign is not None:
            primitives.load_foreign(self._foreign, config=self.config, engine=self.engine, model=self.model)
        if self._resume is None:
            for adapter in build.adapters(self.config):
                adapter.begin(self.model, self.config, self.engine.ranks)
        if self._refers:
            check_base_frozen(self.model, self.config.run.objective.name)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build the parallel optimizer and return the torch optimizer in it, for Lightning."""
        self.optimizer = primitives.initialize_parallel_optimizer(self.config, self.engine, self.model)
        watch_objective(self.objective, self.optimizer.inner, self.config.selected("objective").component)
        return self.optimizer.inner

    def load_resumed(self) -> None:
        """Load weights, optimizer state and counters of the checkpoint that ``resume_from`` named."""
        if self._resume is None:
            return
        storage, manifest = self._resume
        with misfit_explained(self.config, manifest):
            extra = primitives.load_checkpoint(
                storage,
                manifest,
                engine=self.engine,
                model=self.model,
                optimizer=getattr(self, "optimizer", None),
                state=self.train_state,
                average=self.average,
                strict=self.config.run.checkpoint.strict,
            )
        self.resumed, self.resumed_horizon = manifest, extra.get("horizon", self.horizon.max_steps)

    @property
    def first_weights(self) -> str | None:
        """Digest of where the weights that the run began with came from; None where it goes on with later ones."""
        if self.resumed is not None:
            return None
        sections = self.config.to_values()
        changed = (self.config.run.seed, sections["adapter"])
        if self._weights_only is not None:
            return digest("checkpoint", changed, self._weights_only[1].attempt)
        if self._foreign is not None:
            files = sorted(path for path in self._foreign.rglob("*") if path.is_file())
            stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
            return digest("foreign", changed, str(self._foreign.resolve()), *stats)
        return digest("fresh", changed, sections["model"])

    @cached_property
    def hf_facts(self) -> Mapping[str, Any]:
        """What the Hugging Face directory that the weights came from says of using the model; empty without one."""
        for loaded in (self._resume, self._weights_only):
            if loaded is not None and loaded[1].facts.hf:
                return loaded[1].facts.hf
        if self._foreign is None or format_of(self._foreign, self.config.kernel) != "hf":
            return {}
        return read_hf_source(self._foreign).facts()

    def save(self, uri: str, *, lightning: dict[str, Any]) -> Manifest:
        """Commit a checkpoint of everything under the root or step that ``uri`` names."""
        storage, _ = build.locate(self.config, uri)
        self.saved = primitives.save_checkpoint(
            storage,
            config=self.config,
            engine=self.engine,
            model=self.model,
            optimizer=self.optimizer,
            state=self.train_state,
            extra=self._extra(lightning),
            about=primitives.SaveFacts(hf=self.hf_facts),
            average=self.average,
        )
        return self.saved

    def begin_save(self, managed: ManagedSave, *, lightning: dict[str, Any]) -> None:
        """Begin a checkpoint of everything, as ``managed`` says."""
        began_at = time.monotonic()
        managed.begun = primitives.begin_checkpoint(
            managed.manager,
            config=self.config,
            engine=self.engine,
            model=self.model,
            optimizer=self.optimizer,
            state=self.train_state,
            extra=self._extra(lightning),
            about=replace(managed.about, hf=self.hf_facts),
            average=self.average,
        )
        managed.took_s = time.monotonic() - began_at

    def _extra(self, lightning: dict[str, Any]) -> dict[str, Any]:
        return {"lightning": lightning, "horizon": self.horizon.max_steps}

    def training_step(self, batch: StepInput, batch_idx: int) -> None:
        """Run one optimizer step on one global batch.

        Raises:
            NotOurBatch: the batch is of another dataloader.
        """
        _check_batch(batch)
        counted: Any = self.optimizers(use_pl_optimizer=True)
        self.last = primitives.train_step(
            self.model,
            self.optimizer,
            self._referred(batch.micro_batches),
            self.objective,
            self.schedule,
            self.train_state,
            max_norm=self.config.run.trainer.gradient_clip_val,
            apply=counted.step,
        )
        self.train_state.data = batch.position
        if self.average is not None:
            self.average.after_step(self.model, self.train_state.step)
        if self._logs_metrics:
            loss = self.last.loss
            self.log_dict({"loss": loss.loss, "grad_norm": self.last.grad_norm, **loss.metrics}, batch_size=1)
            self.log("lr", self.horizon.lr * self.last.lr_factor, batch_size=1)

    def on_validation_epoch_start(self) -> None:
        """Validate the average where ``exp_manager.ema.evaluate_ema_weights_instead`` says so."""
        if self.average and self.config.run.exp_manager.ema.evaluate_ema_weights_instead:
            self._unaveraged = self.average.put_into(self.model)
        self._figures = ValidationFigures(traits_of(self.objective).unit) if self._logs_metrics else None

    def on_validation_epoch_end(self) -> None:
        """Log what was found, and go back to the weights, before any callback's ``on_validation_end`` saves them."""
        self._log_figures("val")
        if self.average and self._unaveraged is not None:
            self.average.put_back(self.model, self._unaveraged)
            self._unaveraged = None

    def validation_step(  # type: ignore[override]
        self, batch: StepInput, batch_idx: int, dataloader_idx: int = 0
    ) -> StepLoss:
        """Loss of one global batch.

        Raises:
            NotOurBatch: the batch is of another dataloader.
        """
        _check_batch(batch)
        found = self.model.run_eval(self._referred(batch.micro_batches), self.objective)
        if self._figures is not None:
            self._figures.add(dataloader_idx, found)
        return found

    def on_test_epoch_start(self) -> None:
        """Do what :meth:`on_validation_epoch_start` does."""
        self.on_validation_epoch_start()

    def test_step(  # type: ignore[override]
        self, batch: StepInput, batch_idx: int, dataloader_idx: int = 0
    ) -> StepLoss:
        """Return what :meth:`validation_step` does; the metrics are named ``test_loss`` and so on."""
        return self.validation_step(batch, batch_idx, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        """Log the metrics of the test, then do what :meth:`on_validation_epoch_end` does."""
        self._log_figures("test")
        self.on_validation_epoch_end()

    def predict_step(self, batch: StepInput, batch_idx: int, dataloader_idx: int = 0) -> dict[str, torch.Tensor]:
        """Return ``loss``, ``weight`` (what it is a mean over) and the objective's metrics of one global batch.

        Scalars, equal on all ranks. Text is what ``nxdt generate`` writes.
        """
        _check_batch(batch)
        found = self.model.run_eval(self._referred(batch.micro_batches), self.objective)
        return {"loss": found.loss, "weight": found.weight, **found.metrics}

    def _log_figures(self, stage: str) -> None:
        figures, self._figures = self._figures, None
        if figures is None:
            return
        data: Any = getattr(self.trainer, "datamodule", None)
        row = figures.row(getattr(data, "validation_sets", (UNNAMED,)))
        named = scalars(row, traits_of(self.objective).unit, stage)
        self.log_dict({name: math.nan if value is None else value for name, value in named.items()}, batch_size=1)

    def _referred(self, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """With the log-probabilities under the frozen base, where the objective wants them at each step."""
        return with_base(micro_batches, self.model) if self._refers else micro_batches


def _check_batch(batch: object) -> None:
    if not hasattr(batch, "micro_batches"):
        raise NotOurBatch(found=type(batch).__name__)
