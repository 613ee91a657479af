"""What limits leave of datasets."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from nxdt_core.data.sampler import first_batches, limit_sets
from nxdt_core.protocols.batch import Sample
from nxdt_core.protocols.dataset import IterableDataset, MapDataset


class Numbers(MapDataset):
    """Sample i holds i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int, /) -> Sample:
        return Sample(input_ids=np.array([index]), labels=np.array([index]))

    def fingerprint(self) -> str:
        return str(self.size)


class Stream(IterableDataset):
    """Samples without an end."""

    def __iter__(self):
        return (Sample(input_ids=np.array([i]), labels=np.array([i])) for i in count())

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        """Begin anew."""

    def fingerprint(self) -> str:
        return "stream"


@pytest.mark.parametrize(("limit", "samples"), [(2, 16), (9, 50), (0.5, 32), (0.01, 8), (0.0, 0)])
def test_a_limit_takes_whole_batches_from_the_beginning(limit, samples):
    rows = first_batches(Numbers(50), limit, 8)
    assert [int(rows[i].input_ids[0]) for i in range(len(rows))] == [*range(samples)]


@pytest.mark.parametrize(
    ("sizes", "batches", "left"),
    [
        ((60, 20), 4, (24, 8)),
        ((60, 20), 1, (6, 2)),
        ((1000, 1), 2, (16, 1)),
        ((10, 10, 10), 2, (5, 5, 5)),
        ((60, 20), 10, (60, 20)),
        ((60, 20), 11, (60, 20)),
    ],
)
def test_a_count_of_batches_is_dealt_to_sets_by_their_sizes(sizes, batches, left):
    sets = {str(number): Numbers(size) for number, size in enumerate(sizes)}
    assert tuple(len(part) for part in limit_sets(sets, batches, 8).values()) == left


def test_sets_of_unknown_size_are_left_as_they_are():
    sets = {"a": Numbers(100), "b": Stream()}
    assert limit_sets(sets, 1, 8) == sets
