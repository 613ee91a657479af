"""No data at all: for a configuration that describes a model and its tokenizer, as imported checkpoints keep one."""

from __future__ import annotations

from nxdt_core.protocols.dataset import DataContext, IterableDataset, MapDataset, SplitName

__all__ = ["NoData"]


class NoData:
    """A :class:`~nxdt_core.protocols.dataset.DatasetSplits` without splits; training on it raises an error that
    explains this."""

    def __init__(self, config: object, context: DataContext) -> None:
        """There is nothing to configure; both are what the kind's call passes."""

    def split(self, name: SplitName) -> MapDataset | IterableDataset | None:
        """Return None for every split."""
        return None
