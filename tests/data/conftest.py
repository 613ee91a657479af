"""Datasets whose samples say which they are, so that tests can tell what a loader gave to whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from nxdt_core.protocols.batch import Batch, Sample
from nxdt_core.protocols.dataset import IterableDataset, MapDataset


def numbered(index: int, length: int = 4) -> Sample:
    """A sample all of whose tokens are its number."""
    return Sample(input_ids=np.full(length, index), labels=np.full(length, index))


class ByIndex(MapDataset):
    """Map-style samples 0 … size - 1; ``fails_at`` raises there."""

    def __init__(self, size: int, fails_at: int | None = None, digest: str = "by-index") -> None:
        self.size, self.fails_at, self.digest = size, fails_at, digest

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < self.size:
            raise IndexError(index)
        if index == self.fails_at:
            raise RuntimeError(f"sample {index} is damaged")
        return numbered(index)

    def fingerprint(self) -> str:
        return self.digest


class InOrder(IterableDataset):
    """Iterable samples 0 … size - 1 with a position of their own; ``size`` None is endless."""

    def __init__(self, size: int | None) -> None:
        self.size, self.next = size, 0

    def __iter__(self) -> Iterator[Sample]:
        while self.size is None or self.next < self.size:
            self.next += 1
            yield numbered(self.next - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]

    def fingerprint(self) -> str:
        return f"in-order-{self.size}"


@pytest.fixture
def by_index() -> type[ByIndex]:
    return ByIndex


@pytest.fixture
def in_order() -> type[InOrder]:
    return InOrder


@pytest.fixture
def names() -> Callable[[list[Batch]], list[int]]:
    """Numbers of the samples in one rank's part of a step, blanks as −1."""

    def read(batches: list[Batch]) -> list[int]:
        rows = [row for batch in batches for row in zip(batch.input_ids, batch.labels, strict=True)]
        return [int(ids[0]) if int(labels[0]) >= 0 else -1 for ids, labels in rows]

    return read
