"""The data of a run: its splits, cut as ``trainer.limit_…`` says, and this rank's loaders over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxdt_core.config import ResolvedConfig
from nxdt_core.data.loader import GlobalBatchLoader
from nxdt_core.data.preview import Preview
from nxdt_core.data.preview import preview as look
from nxdt_core.data.sampler import first_batches, limit_sets
from nxdt_core.errors.base import NxdtError
from nxdt_core.errors.data import SplitMissing
from nxdt_core.errors.training import LengthUnknown, NoTrainingData, ShareOfUnknownLength
from nxdt_core.protocols.batch import Batch
from nxdt_core.protocols.dataset import DatasetSplits, IterableDataset, MapDataset, SplitName
from nxdt_core.protocols.engine import ParallelEngine
from nxdt_core.protocols.tokenizer import Tokenizer
from nxdt_core.train import build

Dataset = MapDataset | IterableDataset

UNNAMED = ""
"""Name of the validation set of a run that has one."""
_PREVIEWED = 1000
"""Records that a preview reads: enough for its counts, in a second of rendering."""
_CACHE = "data"
"""Directory of the run for what is derived from its data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """Input of one training step."""

    micro_batches: Sequence[Batch]
    """This rank's part of the global batch."""
    position: dict[str, Any]
    """State of the loader after these, for the checkpoint of this step."""


@dataclass(frozen=True, eq=False)
class TrainLoader:
    """Yields a ``StepInput`` a step."""

    loader: GlobalBatchLoader

    def __iter__(self) -> Iterator[StepInput]:
        for micro_batches in self.loader:
            yield StepInput(micro_batches=micro_batches, position=self.loader.state_dict())


class RunData:
    """The configured data; read when :meth:`prepare` is called or a loader is asked for."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self._train: Dataset | None = None
        self._validation: dict[str, Dataset] = {}
        self._test: dict[str, Dataset] | None = None
        """Test data; None until they are read, which training does not do."""

    def prepare(self, *, test: bool = False) -> None:
        """Read tokenizer and data, so that errors in them are reported before a model is built.

        Args:
            test: read the test sets too.

        Raises:
            NoTrainingData: the loader has no training split.
            LengthUnknown: a limit of the training data, and they are a stream.
        """
        if self._train is not None and (self._test is not None or not test):
            return
        vocab_size = build.model_builder(self.config).vocab_size
        self.tokenizer = build.tokenizer(self.config, vocab_size)
        cache_dir = self.config.run_dir / _CACHE
        source = build.dataset(self.config, self.tokenizer, vocab_size, cache_dir=cache_dir)
        if test:
            self._test = _sets(self.config, source, "test")
        if self._train is not None:
            return
        train = _sets(self.config, source, "train").get(UNNAMED)
        self._validation = _sets(self.config, source, "validation")
        if train is None:
            raise NoTrainingData(loader=type(source).__name__)
        trainer = self.config.run.trainer
        if trainer.overfit_batches:
            train = self._first(train, trainer.overfit_batches, LengthUnknown(key="trainer.overfit_batches"))
            self._validation = {UNNAMED: train}
        elif trainer.limit_train_batches is not None:
            train = self._first(train, trainer.limit_train_batches, LengthUnknown(key="trainer.limit_train_batches"))
        self._train = train
        limit = trainer.limit_val_batches
        if isinstance(limit, float) and limit < 1:
            unknown = ShareOfUnknownLength(key="trainer.limit_val_batches", share=limit)
            self._validation = {
                name: self._first(dataset, limit, unknown) for name, dataset in self._validation.items()
            }
        elif isinstance(limit, int) and len(self._validation) > 1:
            self._validation = limit_sets(self._validation, limit, self.config.run.data.global_batch_size)

    @property
    def train_samples(self) -> int | None:
        """Number of samples of one epoch of the training data; None for a stream."""
        return len(self._train) if isinstance(self._train, MapDataset) else None

    @property
    def validation_sets(self) -> tuple[str, ...]:
        """Names of the validation sets in the order of their loaders; :data:`UNNAMED` where there is one."""
        return tuple(self._validation)

    @property
    def test_sets(self) -> tuple[str, ...]:
        """Names of the test sets in the order of their loaders; :data:`UNNAMED` where there is one."""
        return tuple(self._test or ())

    def replace_datasets(self, replacement: Callable[[Dataset, str], Dataset]) -> None:
        """Replace each split by ``replacement(dataset, name of the split)``."""
        self.prepare()
        assert self._train is not None
        self._train = replacement(self._train, "train")
        for split, sets in (("validation", self._validation), ("test", self._test or {})):
            sets.update({name: replacement(dataset, name or split) for name, dataset in sets.items()})

    def train_loader(self, engine: ParallelEngine, position: Mapping[str, Any]) -> TrainLoader:
        """Return this rank's share of endless global batches.

        Args:
            engine: says which share is this rank's.
            position: of the batch before the first one, from ``StepInput.position``; empty for the beginning.
        """
        self.prepare()
        assert self._train is not None
        loader = build.batches(self.config, engine, self._train)
        if position:
            loader.load_state_dict(dict(position))
        return TrainLoader(loader)

    def single_passes(self, engine: ParallelEngine, *, test: bool = False) -> list[TrainLoader]:
        """Return one loader per validation set, or per test set; none where the configuration names no validation data.

        Raises:
            SplitMissing: the configuration names no test data.
        """
        self.prepare(test=test)
        if test and not self._test:
            raise SplitMissing(split="test")
        sets = (self._test or {}) if test else self._validation
        return [TrainLoader(build.batches(self.config, engine, dataset, repeat=False)) for dataset in sets.values()]

    def _first(self, dataset: Dataset, limit: int | float, unknown: NxdtError) -> Dataset:
        """Return the first global batches of a set: a count, or a share, of which there is at least one above 0.

        Raises:
            NxdtError: ``unknown``; the set does not know how many samples it has.
        """
        if isinstance(limit, float) and limit == 1.0:
            return dataset
        if not isinstance(dataset, MapDataset):
            raise unknown
        return first_batches(dataset, limit, self.config.run.data.global_batch_size)


def _sets(config: ResolvedConfig, source: DatasetSplits, name: SplitName) -> dict[str, Dataset]:
    """Return the sets of a split by name, a single one as :data:`UNNAMED`; empty where there are no such data.

    Raises:
        ComponentUnusable: one of them does not inherit from a base class of datasets.
    """
    split = source.split(name)
    if split is None:
        return {}
    sets = dict(split) if isinstance(split, Mapping) else {UNNAMED: split}
    for dataset in sets.values():
        if not isinstance(dataset, (MapDataset, IterableDataset)):
            reason = (
                f"its split {name!r} is a {type(dataset).__name__}, which does not inherit from MapDataset or "
                f"IterableDataset of {MapDataset.__module__}"
            )
            raise config.selected("dataset").component.unusable("target", reason)
    return sets


def preview(
    config: ResolvedConfig, split: SplitName, count: int, *, whole: bool = True
) -> Preview | dict[str, Preview]:
    """Return the first ``count`` samples of a split in the order of the run, and counts; of several sets, of each by
    name.

    Unless it is ``whole``, the split is only so many of its first records where the dataset can read a part of it.

    Raises:
        SplitMissing: the configuration names no such data.
        NxdtError: what training would refuse of tokenizer and data.
    """
    vocab_size = build.model_builder(config).vocab_size
    tokenizer = build.tokenizer(config, vocab_size)
    first = None if whole else max(count, _PREVIEWED)
    sets = _sets(config, build.dataset(config, tokenizer, vocab_size, first_records=first), split)
    if not sets:
        raise SplitMissing(split=split)
    shuffle = config.run.data.shuffle and split == "train"

    def shown(dataset: MapDataset | IterableDataset) -> Preview:
        return look(dataset, tokenizer, count=count, seed=config.run.seed, shuffle=shuffle)

    return shown(sets[UNNAMED]) if [*sets] == [UNNAMED] else {name: shown(dataset) for name, dataset in sets.items()}
