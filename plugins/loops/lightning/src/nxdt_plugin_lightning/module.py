"""Lightning's module over a session, in which one ``training_step`` is one optimizer step on one global batch, and its
data module over the data of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytorch_lightning as pl
import torch

from nxdt_core.checkpoint import Manifest
from nxdt_core.config import ResolvedConfig
from nxdt_core.distributed.devices import profile_of
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.objective import Objective
from nxdt_core.protocols.parallel_model import ParallelModel, ParallelOptimizer, StepLoss
from nxdt_core.protocols.store import CheckpointStore
from nxdt_core.run.callbacks.metrics import scalars
from nxdt_core.train import TrainSession, build
from nxdt_core.train.data import UNNAMED, RunData, StepInput, TrainLoader
from nxdt_core.train.loop import ValidationMetrics
from nxdt_core.train.step import StepResult
from nxdt_plugin_lightning.errors import NotOurBatch, NotOurStrategy


class NxdtModule(pl.LightningModule):
    """The configured model, objective, optimizer and schedule; needs ``NxdtStrategy`` in the ``Trainer``.

    Args:
        config: the run.
        logs_metrics: log metrics as Lightning modules do, so that loggers get them and ``EarlyStopping`` and
            ``ModelCheckpoint`` can monitor them: ``loss``, ``grad_norm`` and ``lr`` of each training step, and
            ``val_loss``, its perplexity and metrics of each validation (``test_…`` of ``trainer.test``).
    """

    last: StepResult
    """Result of the newest training step."""

    def __init__(self, config: ResolvedConfig, *, logs_metrics: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self.session = TrainSession(config)
        """Session that the steps work on, with the counters of the run; its engine is the strategy's."""
        self._logs_metrics = logs_metrics
        self._validation: ValidationMetrics | None = None
        self._validated = ExitStack()

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

    @property
    def model(self) -> ParallelModel:
        """Return the model in its layout; an AttributeError before :meth:`configure_model`."""
        return self.session.model

    @property
    def optimizer(self) -> ParallelOptimizer:
        """Optimizer over the model; an AttributeError before :meth:`configure_optimizers`."""
        return self.session.optimizer

    @property
    def objective(self) -> Objective:
        """The loss; a subclass may set another one."""
        return self.session.objective

    @objective.setter
    def objective(self, objective: Objective) -> None:
        self.session.objective = objective

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Return this rank's parameters under their global names, DTensors where sharded; none before
        :meth:`configure_model`."""
        model = self.session.built_model
        parameters = () if model is None else model.named_parameters()
        return ((f"{prefix}.{name}" if prefix else name, parameter) for name, parameter in parameters)

    def configure_model(self) -> None:
        """Build the model, unless it is there already."""
        if self.session.built_model is None:
            self.session.engine = self.engine
            resumes: tuple[CheckpointStore, Manifest] | None = getattr(self.trainer.strategy, "resumes", None)
            self.session.build_model(resumes=None if resumes is None else resumes[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build the optimizer."""
        self.session.build_optimizer()
        return self.session.optimizer.inner

    def load_saved(self, storage: CheckpointStore, manifest: Manifest) -> None:
        """Load a checkpoint into model and optimizer; called by the strategy."""
        self.session.load_checkpoint(storage, manifest)

    def save(self, uri: str, *, lightning: dict[str, Any]) -> Manifest:
        """Commit a checkpoint of everything under the root or step that ``uri`` names."""
        storage, _ = build.locate(self.config, uri)
        horizon = self.session.config.run.model.optim.sched.max_steps
        return self.session.save(storage, extra={"lightning": lightning, "horizon": horizon})

    def training_step(self, batch: StepInput, batch_idx: int) -> None:
        """Run one optimizer step on one global batch.

        Raises:
            NotOurBatch: the batch is of another dataloader.
        """
        _check_batch(batch)
        counted: Any = self.optimizers(use_pl_optimizer=True)
        self.last = self.session.step(batch, apply=counted.step, collect=False)
        if self._logs_metrics:
            loss = self.last.loss
            self.log_dict({"loss": loss.loss, "grad_norm": self.last.grad_norm, **loss.metrics}, batch_size=1)
            self.log("lr", self.session.config.run.model.optim.lr * self.last.lr_factor, batch_size=1)

    def on_train_start(self) -> None:
        """Turn automatic garbage collections off where ``trainer.gc_interval`` says so."""
        self.session.collections.begin(profile_of(self.engine.device).gc_interval)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Collect garbage where ``trainer.gc_interval`` says so; callbacks have done their work of the step."""
        self.session.collections.after_step(self.session.state.step)

    def on_train_end(self) -> None:
        """Let garbage be collected as before."""
        self.session.collections.close()

    def on_validation_epoch_start(self) -> None:
        """Validate the average where ``exp_manager.ema.evaluate_ema_weights_instead`` says so."""
        self._validated.enter_context(self.session.validated_weights())
        self._validation = ValidationMetrics(self.objective.traits.unit) if self._logs_metrics else None

    def on_validation_epoch_end(self) -> None:
        """Log what was found, and go back to the weights, before any callback's ``on_validation_end`` saves them."""
        self._log_validation("val")
        self._validated.close()

    def validation_step(  # type: ignore[override]
        self, batch: StepInput, batch_idx: int, dataloader_idx: int = 0
    ) -> StepLoss:
        """Return the loss of one global batch.

        Raises:
            NotOurBatch: the batch is of another dataloader.
        """
        _check_batch(batch)
        step_loss = self.session.evaluate_batch(batch)
        if self._validation is not None:
            self._validation.add(dataloader_idx, step_loss)
        return step_loss

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
        self._log_validation("test")
        self.on_validation_epoch_end()

    def predict_step(self, batch: StepInput, batch_idx: int, dataloader_idx: int = 0) -> dict[str, torch.Tensor]:
        """Return ``loss``, ``weight`` (what it is a mean over) and the objective's metrics of one global batch.

        Scalars, equal on all ranks. Text is what ``nxdt generate`` writes.
        """
        _check_batch(batch)
        step_loss = self.session.evaluate_batch(batch)
        return {"loss": step_loss.loss, "weight": step_loss.weight, **step_loss.metrics}

    def _log_validation(self, stage: str) -> None:
        validation, self._validation = self._validation, None
        if validation is None:
            return
        data: Any = getattr(getattr(self.trainer, "datamodule", None), "data", None)
        row = validation.row(getattr(data, "test_sets" if stage == "test" else "validation_sets", (UNNAMED,)))
        named = scalars(row, self.objective.traits.unit, stage)
        self.log_dict({name: math.nan if value is None else value for name, value in named.items()}, batch_size=1)


def _check_batch(batch: object) -> None:
    if not hasattr(batch, "micro_batches"):
        raise NotOurBatch(found=type(batch).__name__)


class NxdtDataModule(pl.LightningDataModule):
    """The configured data: training resumes at the position of the module's state, validation starts over each time."""

    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__()
        self.data = RunData(config)
        """Tokenizer, sets and their sizes; empty before :meth:`setup`."""

    def setup(self, stage: str) -> None:
        """Read tokenizer and data, so that errors in them are reported before a model is built.

        Raises:
            NoTrainingData: the loader has no training split.
            LengthUnknown: a limit of the training data, and they are a stream.
        """
        self.data.prepare(test=True)

    def train_dataloader(self) -> TrainLoader:
        """Return an endless loader; the trainer's ``max_steps`` ends it."""
        return self._session.train_loader()

    def val_dataloader(self) -> list[TrainLoader]:
        """Return one pass over each set; empty where the configuration names no validation data."""
        return self._session.validation_loaders()

    def test_dataloader(self) -> list[TrainLoader]:
        """Return one pass over each test set.

        Raises:
            SplitMissing: the configuration names no test data.
        """
        return self._session.test_loaders()

    def predict_dataloader(self) -> list[TrainLoader]:
        """Return the loaders of :meth:`val_dataloader`."""
        return self.val_dataloader()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return ``batch`` as it is: micro-batches go to the device one at a time."""
        return batch

    @property
    def _session(self) -> TrainSession:
        """Return the module's session, which reads these data."""
        trainer: Any = self.trainer
        session: TrainSession = trainer.lightning_module.session
        session.data = self.data
        return session
