"""Blends keep their shares at every point, and lose and repeat nothing that they should not."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from nxdt_plugin_megatron_data.loader import BlendedDataset, ChainedDataset, in_shares

from nxdt_core.protocols.batch import Sample
from nxdt_core.protocols.dataset import MapDataset


class Numbers(MapDataset):
    """Sample i says which set it is of, and i."""

    def __init__(self, which: int, size: int) -> None:
        self.which, self.size = which, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int, /) -> Sample:
        assert 0 <= index < self.size
        place = np.array([self.which, index])
        return Sample(input_ids=place, labels=place)

    def fingerprint(self) -> str:
        return f"{self.which}-{self.size}"


def numbered(sizes):
    return [Numbers(which, size) for which, size in enumerate(sizes)]


def blended(sizes, shares):
    return BlendedDataset(numbered(sizes), shares)


def taken(dataset):
    return [tuple(dataset[i].input_ids.tolist()) for i in range(len(dataset))]


SHARES = [(0.3, 0.7), (0.5, 0.5), (1 / 3, 1 / 3, 1 / 3), (0.9, 0.09, 0.01), tuple(np.arange(1, 21) / 210)]


@pytest.mark.parametrize("shares", SHARES)
def test_at_every_point_each_set_is_within_two_samples_of_its_share(shares):
    blend = blended([400] * len(shares), shares)
    owners = np.array([blend.source(i)[0] for i in range(min(len(blend), 20_000))])
    for which, share in enumerate(shares):
        counts = np.cumsum(owners == which)
        assert np.abs(counts - share * np.arange(1, len(owners) + 1)).max() < 2


def test_shares_hold_across_the_end_of_the_pattern_and_for_any_length():
    blend = blended([7, 3_000_000], (0.25, 0.75))
    assert len(blend) in range(3_999_990, 4_000_010)
    start = (1 << 20) - 50
    owners = Counter(blend.source(i)[0] for i in range(start, start + 100))
    assert owners == {0: 25, 1: 75}
    assert [blend.source(i)[1] for i in range(40) if blend.source(i)[0] == 0] == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]


def test_proportions_are_those_of_megatron_core_to_a_sample(megatron):
    from megatron.core.datasets.helpers import build_blending_indices

    shares = (0.1, 0.2, 0.3, 0.4)
    which, number = np.zeros(5000, np.int16), np.zeros(5000, np.int64)
    build_blending_indices(which, number, np.array(shares), 4, 5000, False)
    blend = blended([10**6] * 4, shares)
    ours = np.array([blend.source(i)[0] for i in range(5000)])
    for each in range(4):
        assert np.abs(np.cumsum(which == each) - np.cumsum(ours == each)).max() <= 2


def test_a_pass_for_training_has_every_sample_of_every_set():
    seen = Counter(taken(blended([50, 20], (0.5, 0.5))))
    assert {key for key in seen if key[0] == 0} == {(0, i) for i in range(50)}
    assert {key for key in seen if key[0] == 1} == {(1, i) for i in range(20)}
    assert max(count for key, count in seen.items() if key[0] == 0) == 1
    assert set(Counter(seen[key] for key in seen if key[0] == 1)) == {2, 3}


def test_the_next_pass_takes_what_the_one_before_left_of_a_smaller_set():
    blend = blended([50, 20], (0.5, 0.5))
    seen = Counter(
        tuple(blend.at(index, epoch).input_ids.tolist()) for epoch in range(2) for index in range(len(blend))
    )
    assert sum(seen[0, number] == 2 for number in range(50)) >= 49
    assert max(seen[1, n] for n in range(20)) - min(seen[1, n] for n in range(20)) <= 1


@pytest.mark.parametrize(
    ("sizes", "shares", "counts"),
    [
        ([50, 20], (0.5, 0.5), [20, 20]),
        ([50, 20], (0.1, 0.9), [2, 20]),
        ([50, 20], (0.9, 0.1), [50, 6]),
        ([1, 20, 7], (0.8, 0.1, 0.1), [1, 1, 1]),
        ([30, 40], (3 / 7, 4 / 7), [30, 40]),
    ],
)
def test_sets_in_shares_take_what_they_can_and_nothing_twice(sizes, shares, counts):
    sets = in_shares(numbered(sizes), shares)
    assert [len(rows) for rows in sets] == counts
    assert [taken(rows) for rows in sets] == [[(which, i) for i in range(n)] for which, n in enumerate(counts)]


def test_sets_without_weights_come_once_each():
    chain = ChainedDataset([Numbers(0, 3), Numbers(1, 1), Numbers(2, 2)])
    assert taken(chain) == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    with pytest.raises(IndexError):
        chain[6]


def test_the_fingerprint_knows_sets_and_shares():
    prints = [
        blended([5, 6], (0.5, 0.5)).fingerprint(),
        blended([5, 7], (0.5, 0.5)).fingerprint(),
        blended([5, 6], (0.4, 0.6)).fingerprint(),
        ChainedDataset([Numbers(0, 5), Numbers(1, 6)]).fingerprint(),
    ]
    assert len(set(prints)) == len(prints)
