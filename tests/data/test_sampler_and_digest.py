"""The order of the run as a function of the position, and digests that see every border."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nxdt_testing.errors import raises

from nxdt_core.data import sampler
from nxdt_core.data.cache import digest
from nxdt_core.data.sampler import GlobalOrder
from nxdt_core.errors.data import EmptyDataset


@given(st.integers(1, 40), st.lists(st.integers(0, 2_000), min_size=1, max_size=4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_indices_depend_on_the_position_only(length, starts, shuffle):
    """Positions lie within what is computed together, before it and after it."""
    one_by_one = GlobalOrder(length, seed=1, shuffle=shuffle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_WINDOW", 256)  # as all positions cost an epoch each where a run is that short
        for start in starts:
            fresh = GlobalOrder(length, seed=1, shuffle=shuffle)
            assert np.array_equal(fresh.indices(start, start + 50), one_by_one.indices(start, start + 50))


def test_a_batch_larger_than_what_is_computed_together_is_whole():
    indices = GlobalOrder(7_000, seed=1, shuffle=True).indices(0, 7_000)
    assert sorted(indices.tolist()) == list(range(7_000))


def test_no_samples_are_refused():
    with raises(EmptyDataset):
        GlobalOrder(0, seed=0, shuffle=False)


def test_a_digest_sees_borders_order_and_types():
    parts = [("ab", "c"), ("a", "bc"), ("c", "ab"), (b"ab", "c"), ("ab", "c", ""), ("ab", None), (1,), (1.0,), ("1",)]
    assert len({digest(*p) for p in parts}) == len(parts)


def test_a_digest_of_an_array_is_that_of_its_content():
    array = np.arange(12).reshape(3, 4)
    assert digest(array.T) == digest(array.T.copy())
    assert digest(array) != digest(array + 1)


def test_what_needs_no_torch_does_not_import_it():
    modules = ("packing", "sampler", "tokens", "cache")
    imports = ", ".join(f"nxdt_core.data.{module}" for module in modules)
    program = f"import sys; sys.modules['torch'] = None; import {imports}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
