"""Wrong datasets, each with one mistake that a real author could make, under the contract.

Not collected by name: ``test_dataset_mutants.py`` runs this file and expects failures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from nxdt_testing.dataset_contract import DatasetContract

from nxdt_core.protocols.batch import IGNORE_INDEX, Sample
from nxdt_core.protocols.dataset import IterableDataset, MapDataset

LENGTH, COUNT = 8, 30
MUTANTS: list[type] = []


def mutant(cls: type) -> type:
    MUTANTS.append(cls)
    return cls


@mutant
class ByIndex(MapDataset):
    """Right: two documents of four tokens a sample."""

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < COUNT:
            raise IndexError(index)
        tokens = self.start + index * LENGTH + np.arange(LENGTH + 1)
        labels = tokens[1:].copy()
        labels[LENGTH // 2 - 1] = IGNORE_INDEX
        half = np.arange(LENGTH) // (LENGTH // 2)
        return Sample(
            input_ids=tokens[:-1], labels=labels, position_ids=np.arange(LENGTH) % (LENGTH // 2), document_ids=half
        )

    def fingerprint(self) -> str:
        return f"from {self.start}"


@mutant
class InOrder(IterableDataset):
    """Right: the same samples as a stream without end."""

    def __init__(self, start: int = 0) -> None:
        self.samples, self.next = ByIndex(start), 0

    def __iter__(self) -> Iterator[Sample]:
        while True:
            self.next += 1
            yield self.samples[(self.next - 1) % COUNT]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]

    def fingerprint(self) -> str:
        return self.samples.fingerprint()


class Changed(ByIndex):
    """A base of those whose samples are wrong."""

    def __getitem__(self, index: int, /) -> Sample:
        return self.change(super().__getitem__(index))

    def change(self, sample: Sample) -> Sample:
        raise NotImplementedError


@mutant
class InheritsNothing:
    __init__, __len__, __getitem__ = ByIndex.__init__, ByIndex.__len__, ByIndex.__getitem__
    fingerprint = ByIndex.fingerprint


@mutant
class GivesSmallIntegers(Changed):
    def change(self, sample: Sample) -> Sample:
        return replace(sample, input_ids=sample.input_ids.astype(np.int32))


@mutant
class ForgetsAPosition(Changed):
    def change(self, sample: Sample) -> Sample:
        return replace(sample, position_ids=sample.position_ids[:-1])


@mutant
class LearnsNothing(Changed):
    def change(self, sample: Sample) -> Sample:
        return replace(sample, labels=np.full_like(sample.labels, IGNORE_INDEX))


@mutant
class IgnoresByAnotherNumber(Changed):
    def change(self, sample: Sample) -> Sample:
        return replace(sample, labels=np.where(sample.labels == IGNORE_INDEX, -1, sample.labels))


@mutant
class DoesNotShift(Changed):
    def change(self, sample: Sample) -> Sample:
        return replace(sample, labels=np.where(sample.labels == IGNORE_INDEX, IGNORE_INDEX, sample.input_ids))


@mutant
class LearnsAcrossDocuments(Changed):
    def change(self, sample: Sample) -> Sample:
        return replace(sample, labels=sample.input_ids + 1)


@mutant
class LearnsPadding(Changed):
    def change(self, sample: Sample) -> Sample:
        return replace(sample, document_ids=np.where(sample.document_ids == 1, -1, 0))


@mutant
class RepeatsPositions(Changed):
    def change(self, sample: Sample) -> Sample:
        return replace(sample, position_ids=sample.position_ids // 2)


@mutant
class CountsItsReads(ByIndex):
    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self.reads = 0

    def __getitem__(self, index: int, /) -> Sample:
        self.reads += 1
        sample = super().__getitem__(index)
        return replace(sample, labels=sample.labels if self.reads % 7 else np.full_like(sample.labels, IGNORE_INDEX))


@mutant
class FingerprintsItself(ByIndex):
    def fingerprint(self) -> str:
        return str(id(self))


@mutant
class ForgetsTheContent(ByIndex):
    def fingerprint(self) -> str:
        return f"{COUNT} samples"


@mutant
class CountsFromTheEnd(ByIndex):
    def __getitem__(self, index: int, /) -> Sample:
        return super().__getitem__(index % COUNT)


@mutant
class StandsBeforeItsSample(InOrder):
    def __iter__(self) -> Iterator[Sample]:
        while True:
            yield self.samples[self.next % COUNT]
            self.next += 1


@mutant
class ReadsAhead(InOrder):
    def __iter__(self) -> Iterator[Sample]:
        while True:
            block = [self.samples[(self.next + place) % COUNT] for place in range(4)]
            self.next += 4
            yield from block


@mutant
class KeepsAnArray(InOrder):
    def state_dict(self) -> dict[str, Any]:
        return {"next": np.int64(self.next)}


@mutant
class ForgetsItsState(InOrder):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@mutant
class BeginsAnew(InOrder):
    def __iter__(self) -> Iterator[Sample]:
        self.next = 0
        return super().__iter__()


class InPasses(InOrder):
    """Right: each pass in another order; a base of those whose state misses the pass."""

    def __iter__(self) -> Iterator[Sample]:
        while True:
            order = np.random.default_rng(self.next // COUNT).permutation(COUNT)
            self.next += 1
            yield self.samples[int(order[(self.next - 1) % COUNT])]


@mutant
class ForgetsThePass(InPasses):
    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next % COUNT}


@mutant
class PadsOnTheRight(ByIndex):
    """Right: a document that ends with a label that no input has, then padding."""

    def __getitem__(self, index: int, /) -> Sample:
        sample = super().__getitem__(index)
        ids, labels = sample.input_ids.copy(), sample.labels.copy()
        ids[-2:], labels[-2:] = 0, IGNORE_INDEX
        labels[: LENGTH - 2] = [*ids[1 : LENGTH - 2], 10_000]
        return Sample(input_ids=ids, labels=labels, document_ids=np.where(np.arange(LENGTH) < LENGTH - 2, 0, -1))


@mutant
class TakesItsOwnPart(InOrder):
    def __iter__(self) -> Iterator[Sample]:
        ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        for number, sample in enumerate(super().__iter__()):
            if number % ranks == rank:
                yield sample


@mutant
class HandsOutItsState(InOrder):
    """Its state is the dictionary that it continues to count in."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self.state = {"next": 0}

    def __iter__(self) -> Iterator[Sample]:
        while True:
            self.state["next"] += 1
            yield self.samples[(self.state["next"] - 1) % COUNT]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


@mutant
class SeedsTheProcess(ByIndex):
    def __getitem__(self, index: int, /) -> Sample:
        np.random.seed(index % COUNT)
        return super().__getitem__(index)


@mutant
class OfRun(ByIndex):
    """Right: samples follow from the run's sequence length and seed; a base of those that forget one of them."""

    def __init__(self, start: int = 0, seq_length: int = LENGTH, seed: int = 0) -> None:
        super().__init__(start + 10_000 * seed)
        self.seq_length, self.seed = seq_length, seed

    def __getitem__(self, index: int, /) -> Sample:
        sample, names = super().__getitem__(index), ("input_ids", "labels", "position_ids", "document_ids")
        return replace(sample, **{name: getattr(sample, name)[: self.seq_length] for name in names})

    def fingerprint(self) -> str:
        return f"from {self.start}, {self.seq_length}, {self.seed}"


@mutant
class ForgetsTheLength(OfRun):
    def fingerprint(self) -> str:
        return f"from {self.start}"


@mutant
class ForgetsTheSeed(OfRun):
    def fingerprint(self) -> str:
        return f"from {self.start - 10_000 * self.seed}, {self.seq_length}"


def under_contract(cls: type) -> type[DatasetContract]:
    class Contract(DatasetContract):
        @pytest.fixture
        def make(self):
            return cls

        @pytest.fixture
        def changed(self):
            return cls(1000)

        @pytest.fixture
        def variants(self):
            if not issubclass(cls, OfRun):
                return {"seq_length": cls(), "seed": cls()}
            return {"seq_length": cls(seq_length=6), "seed": cls(seed=1)}

    return Contract


for _mutant in MUTANTS:
    globals()[f"Test{_mutant.__name__}"] = under_contract(_mutant)
