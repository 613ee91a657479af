"""Arrays end to end are sliced as one array is."""

from __future__ import annotations

import numpy as np
from nxdt_plugin_hf_data.rows import Chunks


def test_every_slice_is_that_of_one_array():
    arrays = [100 * number + np.arange(size) for number, size in enumerate((0, 3, 5, 0, 1, 9, 2))]
    flat, chunks = np.concatenate(arrays), Chunks(arrays)
    assert len(chunks) == len(flat) == 20
    for begin in range(22):
        for end in range(23):
            assert chunks[begin:end].tolist() == flat[begin:end].tolist()
    assert Chunks([])[0:5].tolist() == []


def test_a_slice_within_one_array_is_no_copy():
    array = np.arange(9)
    assert np.shares_memory(Chunks([np.arange(4), array])[5:8], array)
