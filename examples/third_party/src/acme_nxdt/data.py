"""Sums, written out and tokenised: ``17+25=42``. The index alone decides the sample."""

import hashlib

import numpy as np

from acme_nxdt.config import SumsConfig
from nxdt_core.errors.data import DataNeedsTokenizer
from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_core.protocols.dataset import DataContext, DatasetSplits, MapDataset, SplitName


class SumsDataset(MapDataset):
    """``count`` samples of ``seq_length`` tokens."""

    def __init__(self, count: int, first: int, context: DataContext) -> None:
        if context.tokenizer is None:
            raise DataNeedsTokenizer(dataloader="sums")
        self.count, self.first, self.context, self.tokenizer = count, first, context, context.tokenizer

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        draw = np.random.default_rng((self.context.seed, self.first + index))
        length = self.context.seq_length
        ids: list[int] = []
        while len(ids) <= length:
            a, b = (int(n) for n in draw.integers(0, 100, size=2))
            ids += self.tokenizer.encode(f"{a}+{b}={a + b}\n")
        tokens = np.array(ids[: length + 1], dtype=np.int64)
        labels = tokens[1:].copy()
        labels[-1] = IGNORE_INDEX  # the cut may fall into a number, whose end is unknown
        return Sample(input_ids=tokens[:-1], labels=labels)

    def fingerprint(self) -> str:
        """Digest of all that decides a sample."""
        facts = (self.count, self.first, self.context.seed, self.context.seq_length, self.tokenizer.fingerprint())
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


class Sums(DatasetSplits):
    """The component: one dataset a split, of different sums."""

    def __init__(self, config: SumsConfig, context: DataContext) -> None:
        self.config, self.context = config, context

    def split(self, name: SplitName) -> SumsDataset | None:
        """Training samples come first; validation draws from numbers behind them; there is no test split."""
        if name == "train":
            return SumsDataset(self.config.count, 0, self.context)
        if name == "validation":
            return SumsDataset(64, self.config.count, self.context)
        return None
