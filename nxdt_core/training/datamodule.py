"""Lightning's data module over the core's global-batch loader, with the run's position and waiting times."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch

from nxdt_core.config import ResolvedConfig
from nxdt_core.data.head import Head
from nxdt_core.data.loader import GlobalBatchLoader
from nxdt_core.errors import LengthUnknown, NoTrainingData, ShareOfUnknownLength
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.dataloader import IterableDataset, MapDataset, SplitName
from nxdt_core.protocols.engine import RankInfo
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.training import assemble

__all__ = ["NxdtDataModule", "StepInput", "TrainLoader"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """What one training step consumes."""

    micro_batches: Sequence[Batch]
    position: dict[str, Any]
    """State of the loader after these, for the checkpoint of this step."""


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
        self._datasets: dict[SplitName, MapDataset | IterableDataset | None] = {}

    def prepare(self) -> None:
        """Read tokenizer and data, so that what is wrong with them is said before a model is built.

        Raises:
            NoTrainingData: the loader has no training split.
            LengthUnknown: a limit of the training data, and they are a stream.
        """
        if self._datasets:
            return
        vocab_size = assemble.model_builder(self.config).vocab_size
        self.tokenizer = assemble.tokenizer(self.config, vocab_size)
        source = assemble.dataloader(self.config, self.tokenizer, vocab_size)
        for name in ("train", "validation"):
            self._datasets[name] = source.split(name)
        if self._datasets["train"] is None:
            raise NoTrainingData(loader=type(source).__name__)
        trainer = self.config.run.trainer
        if trainer.overfit_batches:
            self._datasets["train"] = self._first("trainer.overfit_batches", trainer.overfit_batches)
            self._datasets["validation"] = self._datasets["train"]
        elif trainer.limit_train_batches is not None:
            self._datasets["train"] = self._first("trainer.limit_train_batches", trainer.limit_train_batches)

    @property
    def train_samples(self) -> int | None:
        """Samples of a pass over the training data; None where they do not know."""
        dataset = self._datasets["train"]
        return len(dataset) if isinstance(dataset, MapDataset) else None

    def setup(self, stage: str) -> None:
        """Lightning's hook: see :meth:`prepare`."""
        self.prepare()

    def train_dataloader(self) -> TrainLoader:
        """Endless; the trainer's ``max_steps`` ends it."""
        trainer: Any = self.trainer
        loader = self._loader("train", repeat=True)
        assert loader is not None
        position = trainer.lightning_module.train_state.data
        if position:
            loader.load_state_dict(position)
        self.train_loader = TrainLoader(loader)
        return self.train_loader

    def val_dataloader(self) -> TrainLoader | list[StepInput]:
        """One pass; empty where the configuration names no validation data."""
        loader = self._loader("validation", repeat=False)
        return [] if loader is None else TrainLoader(loader)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """``batch`` as it is: micro-batches go to the device one at a time."""
        return batch

    def validation_batches(self, share: float) -> int:
        """Global batches in a share of the validation split, at least one of a share above 0.

        Raises:
            ShareOfUnknownLength: the split does not know how many samples it has.
        """
        dataset = self._datasets["validation"]
        if dataset is None:
            return 0
        if not isinstance(dataset, MapDataset):
            raise ShareOfUnknownLength(key="trainer.limit_val_batches", share=share)
        return math.ceil(share * math.ceil(len(dataset) / self.config.run.data.global_batch_size))

    def _first(self, key: str, limit: int | float) -> MapDataset | IterableDataset:
        """The first global batches of the training data: a count, or a share."""
        dataset, size = self._datasets["train"], self.config.run.data.global_batch_size
        assert dataset is not None
        if isinstance(limit, float) and limit == 1.0:
            return dataset
        if not isinstance(dataset, MapDataset):
            raise LengthUnknown(key=key)
        batches = limit if isinstance(limit, int) else math.ceil(limit * math.ceil(len(dataset) / size))
        return Head(dataset, batches * size)

    def _loader(self, split: SplitName, *, repeat: bool) -> GlobalBatchLoader | None:
        dataset = self._datasets[split]
        if dataset is None:
            return None
        data, rank = self.config.run.data, self._rank_info()
        return GlobalBatchLoader(
            dataset,
            global_batch_size=data.global_batch_size,
            micro_batch_size=data.micro_batch_size,
            seed=self.config.run.seed,
            shuffle=data.shuffle and repeat and not self.config.run.trainer.overfit_batches,
            dp_rank=rank.dp_rank,
            dp_size=rank.dp_size,
            drop_last=repeat,
            repeat=repeat,
            num_workers=data.num_workers,
        )

    def _rank_info(self) -> RankInfo:
        trainer: Any = self.trainer
        info: RankInfo = trainer.strategy.engine.rank_info
        return info
