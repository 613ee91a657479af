"""Lightning's data module over the core's global-batch loader, with the run's position and waiting times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytorch_lightning as pl
import torch

from nxdt_core.config import ResolvedConfig
from nxdt_core.data.limits import first_batches, together
from nxdt_core.data.loader import GlobalBatchLoader
from nxdt_core.errors.training import LengthUnknown, NoTrainingData, ReferenceNeedsLength, ShareOfUnknownLength
from nxdt_core.protocols.dataloader import IterableDataset, MapDataset
from nxdt_core.protocols.objective import traits_of
from nxdt_core.protocols.parallel.engine import ParallelEngine
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.training import build
from nxdt_core.training.callbacks.validation_figures import UNNAMED
from nxdt_core.training.lightning.module import NxdtModule
from nxdt_core.training.lightning.step_input import StepInput
from nxdt_core.training.weights.reference import with_reference

__all__ = ["NxdtDataModule", "TrainLoader"]

Dataset = MapDataset | IterableDataset

_CACHE = "data"
"""Directory of the run for what is derived from its data."""


class TrainLoader:
    """Yields a ``StepInput`` a step and adds up how long the loop waited for them."""

    def __init__(self, loader: GlobalBatchLoader) -> None:
        self._loader = loader
        self.waited_s = 0.0
        """Seconds that the loop has spent in here so far."""

    def __iter__(self) -> Iterator[StepInput]:
        batches = iter(self._loader)
        while True:
            before = time.perf_counter()
            micro_batches = next(batches, None)
            self.waited_s += time.perf_counter() - before
            if micro_batches is None:
                return
            yield StepInput(micro_batches=micro_batches, position=self._loader.state_dict())


class NxdtDataModule(pl.LightningDataModule):
    """The configured data: training goes on where the module's state says, validation starts anew each time."""

    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__()
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self.train_loader: TrainLoader | None = None
        self._train: Dataset | None = None
        self._validation: dict[str, Dataset] = {}
        self._referenced = False

    def prepare(self) -> None:
        """Read tokenizer and data, so that what is wrong with them is said before a model is built.

        Raises:
            NoTrainingData: the loader has no training split.
            LengthUnknown: a limit of the training data, and they are a stream.
        """
        if self._train is not None:
            return
        vocab_size = build.model_builder(self.config).vocab_size
        self.tokenizer = build.tokenizer(self.config, vocab_size)
        cache_dir = self.config.run_dir / _CACHE
        source = build.dataloader(self.config, self.tokenizer, vocab_size, cache_dir=cache_dir)
        train, validation = source.split("train"), source.split("validation")
        if train is None or isinstance(train, Mapping):
            raise NoTrainingData(loader=type(source).__name__)
        trainer = self.config.run.trainer
        if trainer.overfit_batches:
            train = validation = self._first(train, "trainer.overfit_batches", trainer.overfit_batches)
        elif trainer.limit_train_batches is not None:
            train = self._first(train, "trainer.limit_train_batches", trainer.limit_train_batches)
        self._train = train
        if validation is not None:
            self._validation = dict(validation) if isinstance(validation, Mapping) else {UNNAMED: validation}
        limit = trainer.limit_val_batches
        if isinstance(limit, float) and limit < 1:
            self._validation = {name: self._share(dataset, limit) for name, dataset in self._validation.items()}
        elif isinstance(limit, int) and len(self._validation) > 1:
            self._validation = together(self._validation, limit, self.config.run.data.global_batch_size)

    @property
    def train_samples(self) -> int | None:
        """Samples of a pass over the training data; None where they do not know."""
        return len(self._train) if isinstance(self._train, MapDataset) else None

    @property
    def validation_sets(self) -> tuple[str, ...]:
        """Names of the sets that are validated, in the order of their loaders; :data:`UNNAMED` where there is one."""
        return tuple(self._validation)

    def setup(self, stage: str) -> None:
        """Call :meth:`prepare`, as a hook of Lightning."""
        self.prepare()

    def train_dataloader(self) -> TrainLoader:
        """Endless; the trainer's ``max_steps`` ends it."""
        trainer: Any = self.trainer
        self._refer()
        assert self._train is not None
        loader = build.batches(self.config, trainer.strategy.engine, self._train)
        position = trainer.lightning_module.train_state.data
        if position:
            loader.load_state_dict(position)
        self.train_loader = TrainLoader(loader)
        return self.train_loader

    def val_dataloader(self) -> list[TrainLoader]:
        """One pass over each set; empty where the configuration names no validation data."""
        self._refer()
        trainer: Any = self.trainer
        engine: ParallelEngine = trainer.strategy.engine
        sets = self._validation.values()
        return [TrainLoader(build.batches(self.config, engine, dataset, repeat=False)) for dataset in sets]

    def test_dataloader(self) -> list[TrainLoader]:
        """Return the loaders of :meth:`val_dataloader`: the configuration names no third split."""
        return self.val_dataloader()

    def predict_dataloader(self) -> list[TrainLoader]:
        """Return the loaders of :meth:`val_dataloader`."""
        return self.val_dataloader()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """``batch`` as it is: micro-batches go to the device one at a time."""
        return batch

    def _refer(self) -> None:
        """Give every sample the log-probabilities of the run's first weights, where the objective compares with them.

        Raises:
            ReferenceNeedsLength: of a stream.
            ReferenceLost: the run goes on, and they are not there.
        """
        trainer: Any = self.trainer
        module: NxdtModule = trainer.lightning_module
        if self._referenced or traits_of(module.objective).reference != "before":
            return
        assert self._train is not None
        self._train = self._with_reference(self._train, "train", module)
        self._validation = {
            name: self._with_reference(dataset, name or "validation", module)
            for name, dataset in self._validation.items()
        }
        self._referenced = True

    def _with_reference(self, dataset: Dataset, split: str, module: NxdtModule) -> Dataset:
        if not isinstance(dataset, MapDataset):
            raise ReferenceNeedsLength(objective=self.config.run.objective.name, split=split)
        return with_reference(
            dataset, config=self.config, engine=module.engine, model=module.model, weights=module.first_weights
        )

    def _first(self, dataset: Dataset, key: str, limit: int | float) -> Dataset:
        """The first global batches of the training data: a count, or a share."""
        if isinstance(limit, float) and limit == 1.0:
            return dataset
        if not isinstance(dataset, MapDataset):
            raise LengthUnknown(key=key)
        return first_batches(dataset, limit, self.config.run.data.global_batch_size)

    def _share(self, dataset: Dataset, share: float) -> Dataset:
        """The first global batches of a validation set, at least one of a share above 0.

        Raises:
            ShareOfUnknownLength: the set does not know how many samples it has.
        """
        if not isinstance(dataset, MapDataset):
            raise ShareOfUnknownLength(key="trainer.limit_val_batches", share=share)
        return first_batches(dataset, share, self.config.run.data.global_batch_size)
