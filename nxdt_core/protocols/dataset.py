"""Kind ``dataset``: where training samples come from.

A plugin yields single samples by index or in order; the core does the rest: which rank takes which sample, order of
epochs, micro-batches, collation, prefetching, and the exact position that a checkpoint keeps.

Example::

    class Lines(DatasetSplits):
        def __init__(self, config: LinesConfig, context: DataContext) -> None: ...
        def split(self, name: str) -> MapDataset | None:
            return LineDataset(self.files[name]) if name in self.files else None
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nxdt_core.protocols.batch import Sample
from nxdt_core.protocols.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "DataContext",
    "DataReport",
    "DatasetSplits",
    "IterableDataset",
    "MapDataset",
    "Split",
    "SplitName",
    "TokenCount",
]

SplitName = Literal["train", "validation", "test"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataContext:
    """The facts of a run for its dataloader; fields may be added."""

    seq_length: int
    """Tokens per sample."""
    seed: int
    tokenizer: Tokenizer | None
    """The run's tokenizer; None where the configuration names none (pre-tokenised data)."""
    cache_dir: Path | None = None
    """Directory of the run, perhaps to be made, for what all its processes derive identically from the data, such as
    tokens (:func:`nxdt_core.data.cache.cached_arrays`); None means: keep it in memory."""
    vocab_size: int | None = None
    """Rows of the model's vocabulary: tokenised data may hold the ids below; None where it is not known."""
    first_records: int | None = None
    """Records of each split to read where only samples are looked at; None reads all."""
    shuffle: bool = True
    """``data.shuffle``, for datasets whose order is their own; the core shuffles map-style ones."""


class MapDataset(ABC):
    """Samples by index. The core shuffles, shards and repeats them; the index alone decides the sample."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int, /) -> Sample: ...

    @abstractmethod
    def fingerprint(self) -> str:
        """Return the short digest of everything that decides what sample an index gives; compared on resume."""

    def at(self, index: int, epoch: int) -> Sample:
        """Return the sample at ``index`` in pass ``epoch`` (0, 1, …); in pass 0 that of ``self[index]``. Default:
        passes do not differ. A mixture that repeats a part of its samples overrides it."""
        return self[index]

    def report(self) -> DataReport | None:
        """Return the counts of all records. Default: None, and a preview counts the tokens of some samples."""
        return None


class IterableDataset(ABC):
    """Samples in the dataset's own order, endless or finite. That order is global: each rank takes its part of it."""

    @abstractmethod
    def __iter__(self) -> Iterator[Sample]: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-able position after the last sample that was yielded."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the position of ``state``."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a short digest of everything that decides the samples; compared on resume."""

    def report(self) -> DataReport | None:
        """Return counts of all records, as :meth:`MapDataset.report`."""
        return None


Split = MapDataset | IterableDataset | Mapping[str, MapDataset | IterableDataset] | None
"""The data of a split, as a dataloader returns it: one dataset, several by name, or none."""


class DatasetSplits(ABC):
    """The target of the kind, called as ``Target(config, context)`` with the section."""

    def __init__(self, config: Any, context: DataContext) -> None:
        self.config, self.context = config, context

    @abstractmethod
    def split(self, name: SplitName) -> Split:
        """Return the samples of a split, or None where the configuration names no data for it.

        Of validation and test also several sets by name, each of which is then judged by itself, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """Tokens, and how many of them the loss is on."""

    tokens: int = 0
    trained: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """Statistics of all records of a dataset."""

    records: int
    """Records that samples are made of."""
    tokens: TokenCount
    """Tokens of these records."""
    lengths: NDArray[np.int64]
    """Tokens of each record."""
    by_role: Mapping[str, TokenCount] = field(default_factory=dict)
    """Role, or ``template`` for the template's own text → its tokens."""
    by_turn: Sequence[TokenCount] = ()
    """Tokens of the assistant's first, second, … turns."""
    truncated: int = 0
    """Records that were cut to fit."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Reason → records that no sample has."""
    bad: Sequence[str] = ()
    """Place and reason of records that cannot be used; of many, the first ones."""
    of_records: int | None = None
    """Records of the files where only the first ones were read; None: all were read."""
    unused: Mapping[str, int] = field(default_factory=dict)
    """Field of records that neither their format nor a chat template uses → records that have it."""
    efficiency: float | None = None
    """Share of the samples' positions that hold a token to predict from; the rest is padding."""
