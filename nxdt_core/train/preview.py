"""The data of a configuration, looked at before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping

from nxdt_core.config import ResolvedConfig
from nxdt_core.data.preview import Preview
from nxdt_core.data.preview import preview as look
from nxdt_core.errors.data import SplitMissing
from nxdt_core.protocols.dataset import IterableDataset, MapDataset, SplitName
from nxdt_core.train import build

__all__ = ["preview"]


def preview(config: ResolvedConfig, split: SplitName, count: int) -> Preview | dict[str, Preview]:
    """Return the first ``count`` samples of a split in the order of the run, and counts; of several sets, of each by
    name.

    Raises:
        SplitMissing: the configuration names no such data.
        NxdtError: what training would refuse of tokenizer and data.
    """
    vocab_size = build.model_builder(config).vocab_size
    tokenizer = build.tokenizer(config, vocab_size)
    found = build.dataset(config, tokenizer, vocab_size).split(split)
    if not found and (found is None or isinstance(found, Mapping)):
        raise SplitMissing(split=split)
    shuffle = config.run.data.shuffle and split == "train"

    def shown(dataset: MapDataset | IterableDataset) -> Preview:
        return look(dataset, tokenizer, count=count, seed=config.run.seed, shuffle=shuffle)

    return {name: shown(each) for name, each in found.items()} if isinstance(found, Mapping) else shown(found)
