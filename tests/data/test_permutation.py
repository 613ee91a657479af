"""The computed order is a permutation, is stable, and looks random where it matters."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdt_core.data.sampler import Permutation


def order(length: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return Permutation(length, seed=seed, epoch=epoch).take(np.arange(length))


@pytest.mark.parametrize("length", [*range(1, 70), 65_535, 65_536, 65_537, 66_049, 66_050])
def test_every_item_stands_at_exactly_one_place(length):
    assert sorted(order(length).tolist()) == list(range(length))


@given(st.integers(1, 200) | st.integers(65_000, 70_000), st.integers(-(2**70), 2**70), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_any_seed_and_epoch_give_a_permutation(length, seed, epoch):
    assert np.array_equal(np.sort(order(length, seed, epoch)), np.arange(length))


def test_parts_equal_the_whole():
    for length in (1_000, 70_000):
        permutation, whole = Permutation(length, seed=3, epoch=2), order(length, 3, 2)
        assert np.array_equal(permutation.take(np.array([999, 0, 500])), whole[[999, 0, 500]])


def test_the_order_is_part_of_the_checkpoint_format():
    """A resumed run relies on these figures: they may not change with numpy, the platform or a rewrite."""
    assert order(10, seed=1234, epoch=0).tolist() == [8, 9, 7, 3, 0, 1, 4, 2, 5, 6]
    assert Permutation(10**12, seed=1, epoch=7).take(np.arange(3)).tolist() == [
        179388886439,
        495380111751,
        647842080279,
    ]


def test_huge_lengths_cost_no_memory():
    items = Permutation(10**15, seed=0, epoch=0).take(np.arange(1_000))
    assert len(set(items.tolist())) == 1_000
    assert items.min() >= 0
    assert items.max() < 10**15


def test_seed_and_epoch_both_change_the_order():
    orders = {tuple(order(50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
    assert not np.array_equal(order(70_000, 0, 0), order(70_000, 0, 1))
    assert not np.array_equal(order(70_000, 0, 0), order(70_000, 1, 0))


def test_small_lengths_reach_all_orders_about_equally_often():
    seen = Counter(tuple(order(4, seed)) for seed in range(4_800))
    assert set(seen) == set(permutations(range(4)))
    chi_square = sum((count - 200) ** 2 / 200 for count in seen.values())
    assert chi_square < 60  # 23 degrees of freedom: mean 23, beyond 60 by chance once in 25,000


def test_each_item_is_about_equally_likely_at_each_place():
    counts = np.zeros((37, 37))
    for epoch in range(3_700):
        counts[np.arange(37), order(37, 5, epoch)] += 1
    chi_square = ((counts - 100) ** 2 / 100).sum()
    assert abs(chi_square - 36 * 36) < 6 * np.sqrt(2 * 36 * 36)


def test_each_item_of_a_long_order_is_about_equally_likely_in_each_tenth():
    places = np.array([0, 1, 34_999, 69_999])
    items = np.array([Permutation(70_000, seed=5, epoch=epoch).take(places) for epoch in range(2_000)])
    for column in items.T:
        counts = np.bincount(column // 7_000, minlength=10)
        assert ((counts - 200) ** 2 / 200).sum() < 40  # 9 degrees of freedom: beyond 40 once in 130,000


def test_successive_items_are_independent():
    items = order(100_000)
    pairs, _, _ = np.histogram2d(items[:-1], items[1:], bins=32)
    expected = (len(items) - 1) / 1024
    chi_square = ((pairs - expected) ** 2 / expected).sum()
    assert abs(chi_square - 1023) < 5 * np.sqrt(2 * 1023)


def test_neighbours_do_not_stay_neighbours():
    steps = np.diff(order(100_000))
    assert (np.abs(steps) == 1).mean() < 1e-3
    assert abs(np.corrcoef(np.arange(100_000), order(100_000))[0, 1]) < 0.02
    assert abs(np.corrcoef(order(100_000, 0, 0), order(100_000, 0, 1))[0, 1]) < 0.02


def test_an_empty_range_is_refused():
    with pytest.raises(ValueError, match="positive"):
        Permutation(0, seed=0, epoch=0)
