"""Stochastic rounding: exact on average, nearest neighbours only, by position."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdt_core.nn.rounding import round_into
from nxdt_core.nn.streams import Stream

SIGMAS = 5
"""One draw in two million leaves this bound; the draws are fixed by the seed."""


def rounded(values, stream, shape=None, offsets=None):
    target = torch.zeros(values.shape, dtype=torch.bfloat16)
    round_into(target, values.clone(), stream, shape=shape or values.shape, offsets=offsets or [0] * values.dim())
    return target


def neighbours(value):
    """The largest bfloat16 that is no larger in size than ``value``, and the next in size."""
    bits = torch.tensor(value, dtype=torch.float32).view(torch.int32) & ~0xFFFF
    return [float(each.view(torch.float32)) for each in (bits, bits + 0x10000)]


@pytest.mark.parametrize("value", [1 + 2**-9, -(1 + 2**-9), 1 + 2**-16, 0.1, -3.14159, 1e-30, 65535.9, 1 - 2**-24])
@pytest.mark.parametrize("along", ["positions", "steps"])
def test_the_mean_is_the_value(value, along):
    value = float(torch.tensor(value, dtype=torch.float32))
    draws = 2**16 if along == "positions" else 2**9
    if along == "positions":
        found = rounded(torch.full((draws,), value), Stream.of(1, "w"))
    else:
        found = torch.cat([rounded(torch.full((1,), value), Stream.of(1, f"w\0{step}")) for step in range(draws)])
    low, high = neighbours(value)
    up = (value - low) / (high - low)
    assert set(found.tolist()) <= {low, high}
    share = float((found.double() == high).double().mean())
    assert abs(share - up) <= SIGMAS * math.sqrt(up * (1 - up) / draws)


@settings(deadline=None)
@given(st.floats(width=32, allow_subnormal=False).map(lambda value: torch.tensor([value]).bfloat16().float()))
def test_what_bfloat16_has_stays(values):
    torch.testing.assert_close(rounded(values, Stream.of(0, "w")).float(), values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000])
def test_no_nan_becomes_a_number(pattern):
    values = torch.full((4096,), pattern, dtype=torch.int32).view(torch.float32)
    assert not rounded(values, Stream.of(0, "w")).isfinite().any()


@settings(deadline=None)
@given(st.data())
def test_a_block_is_rounded_as_in_the_whole(data):
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(0, size - start)) for size, start in zip(shape, starts, strict=True)]
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    box = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    stream = Stream.of(7, "w")
    assert torch.equal(rounded(whole[box].contiguous(), stream, shape, starts), rounded(whole, stream)[box])


def test_steps_names_and_seeds_draw_apart():
    values = torch.full((1000,), 1 + 2**-8)  # half way between two
    streams = [Stream.of(0, "a"), Stream.of(0, "b"), Stream.of(1, "a")]
    first, *others = (rounded(values, stream) for stream in streams)
    for other in others:
        assert 400 < int((first != other).sum()) < 600
