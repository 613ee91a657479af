"""Lightning's data module over the data of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch

from nxdt_core.config import ResolvedConfig
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.train.data import RunData, TrainLoader

if TYPE_CHECKING:
    from nxdt_core.train import TrainSession


class NxdtDataModule(pl.LightningDataModule):
    """The configured data: training resumes at the position of the module's state, validation starts over each time."""

    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__()
        self.data = RunData(config)
        self.train_loader: TrainLoader | None = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the run; None before :meth:`prepare`, or where the configuration names none."""
        return self.data.tokenizer

    @property
    def train_samples(self) -> int | None:
        """Number of samples of one epoch of the training data; None for a stream."""
        return self.data.train_samples

    @property
    def validation_sets(self) -> tuple[str, ...]:
        """Names of the validation sets in the order of their loaders."""
        return self.data.validation_sets

    @property
    def test_sets(self) -> tuple[str, ...]:
        """Names of the test sets in the order of their loaders."""
        return self.data.test_sets

    def prepare(self) -> None:
        """Read tokenizer and data, so that errors in them are reported before a model is built.

        Raises:
            NoTrainingData: the loader has no training split.
            LengthUnknown: a limit of the training data, and they are a stream.
        """
        self.data.prepare(test=True)

    def setup(self, stage: str) -> None:
        """Call :meth:`prepare`, as a hook of Lightning."""
        self.prepare()

    def train_dataloader(self) -> TrainLoader:
        """Return an endless loader; the trainer's ``max_steps`` ends it."""
        self.train_loader = self._session.train_loader()
        return self.train_loader

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
        """``batch`` as it is: micro-batches go to the device one at a time."""
        return batch

    @property
    def _session(self) -> TrainSession:
        """The module's, which reads these data."""
        trainer: Any = self.trainer
        session: TrainSession = trainer.lightning_module.session
        session.data = self.data
        return session
