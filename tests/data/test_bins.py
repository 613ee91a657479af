"""First-fit decreasing beside a loop that does what its name says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdt_core.data.packing import first_fit_decreasing, first_fit_in_rows, shuffled_bins


def by_the_book(lengths, capacity):
    """Each item, the longest first, into the first bin with room in each of its rows."""
    bins = []
    for item in sorted(range(len(lengths)), key=lambda i: -sum(lengths[i])):
        for content in bins:
            if all(sum(row) <= capacity for row in zip(*(lengths[i] for i in [*content, item]), strict=True)):
                content.append(item)
                break
        else:
            bins.append([item])
    return bins


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 20), max_size=60))
def test_bins_are_those_of_the_definition(lengths):
    found = first_fit_decreasing(np.array(lengths, np.int64), 20)
    assert [content.tolist() for content in found] == by_the_book([(length,) for length in lengths], 20)


@settings(deadline=None)
@given(lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=60))
def test_bins_of_rows_are_those_of_the_definition(lengths):
    found = first_fit_in_rows(np.array(lengths, np.int64).reshape(-1, 2), 20)
    assert [content.tolist() for content in found] == by_the_book(lengths, 20)


def test_a_seed_draws_who_shares_a_bin_with_whom():
    alike = np.full((60, 2), 7)
    drawn = [shuffled_bins(lengths, 20, seed=seed) for lengths in (alike, alike[:, 0]) for seed in (1, 1, 2)]
    shared = [{frozenset(content.tolist()) for content in found} for found in drawn]
    assert [len(content) for found in drawn for content in found] == [2] * 30 * 6
    assert shared[0] == shared[1] == shared[3]
    assert len(shared[0] & shared[2]) < 5


@pytest.mark.parametrize("rows", [None, 2])
def test_drawn_bins_and_their_items_are_in_the_order_of_the_items(rows):
    lengths = np.random.default_rng(0).integers(1, 20, 200 if rows is None else (200, rows))
    found = [content.tolist() for content in shuffled_bins(lengths, 20, seed=1)]
    assert found == sorted(map(sorted, found))
    assert sorted(item for content in found for item in content) == list(range(200))


def test_a_hundred_thousand_skewed_lengths_leave_little_room():
    lengths = np.random.default_rng(0).lognormal(5.5, 0.9, 100_000).astype(np.int64).clip(16, 4096)
    found = first_fit_decreasing(lengths, 4096)
    assert sorted(np.concatenate(found).tolist()) == list(range(100_000))
    assert max(lengths[content].sum() for content in found) <= 4096
    assert lengths.sum() / (4096 * len(found)) > 0.99


@pytest.mark.parametrize("lengths", [[21], [0], [-1, 3]])
def test_items_that_fit_into_no_bin_are_refused(lengths):
    with pytest.raises(ValueError, match="between 1 and 20"):
        first_fit_decreasing(np.array(lengths), 20)
