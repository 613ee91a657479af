"""Stochastic rounding: exact on average, nearest neighbours only, by position."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdt_core.models.random.init import Rows, rows_of
from nxdt_core.models.random.rounding import element_numbers, hashed, noise, noises, rounded_number, rounding_key
from nxdt_core.models.random.rounding import rounded as rounded_by
from tests.sampling import slow, slow_except

SIGMAS = 5
"""One draw in two million leaves this bound; the draws are fixed by the seed."""


def key(name, seed=0):
    return torch.tensor(rounding_key(seed, name), dtype=torch.int32)


def numbers(shape, offsets, sizes):
    parts = rows_of(shape, offsets, sizes)
    return torch.cat([int32(p.first) + index(p) + index(p) // p.columns * int32(p.gap) for p in parts])


def index(part):
    return torch.arange(part.count * part.columns, dtype=torch.int32)


def int32(number):
    return (number + 2**31) % 2**32 - 2**31


def rounded(values, name, shape=None, offsets=None, seed=0):
    found = numbers(shape or values.shape, offsets or [0] * values.dim(), values.shape)
    return rounded_by(values.flatten(), noise(found, key(name, seed))).view(values.shape).bfloat16()


def neighbours(value):
    """The largest bfloat16 that is no larger in size than ``value``, and the next in size."""
    bits = torch.tensor(value, dtype=torch.float32).view(torch.int32) & ~0xFFFF
    return [float(each.view(torch.float32)) for each in (bits, bits + 0x10000)]


MEANS = (1 + 2**-9, -(1 + 2**-9), 1 + 2**-16, 0.1, -3.14159, 1e-30, 65535.9, 1 - 2**-24)


@pytest.mark.parametrize(
    ("along", "value"),
    [
        *(("positions", value) for value in MEANS),
        *slow_except([("steps", value) for value in MEANS], [("steps", 1 + 2**-9), ("steps", -3.14159)]),
    ],
)
def test_the_mean_is_the_value(value, along):
    """Draws along steps have other keys; what a value's bits decide is seen along positions."""
    value = float(torch.tensor(value, dtype=torch.float32))
    draws = 2**16 if along == "positions" else 2**9
    if along == "positions":
        found = rounded(torch.full((draws,), value), "w", seed=1)
    else:
        found = torch.cat([rounded(torch.full((1,), value), f"w\0{step}", seed=1) for step in range(draws)])
    low, high = neighbours(value)
    up = (value - low) / (high - low)
    assert set(found.tolist()) <= {low, high}
    share = float((found.double() == high).double().mean())
    assert abs(share - up) <= SIGMAS * math.sqrt(up * (1 - up) / draws)


@settings(deadline=None)
@given(st.floats(width=32, allow_subnormal=False).map(lambda value: torch.tensor([value]).bfloat16().float()))
def test_what_bfloat16_has_stays(values):
    torch.testing.assert_close(rounded(values, "w").float(), values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000])
def test_no_nan_becomes_a_number(pattern):
    values = torch.full((4096,), pattern, dtype=torch.int32).view(torch.float32)
    assert not rounded(values, "w").isfinite().any()


@settings(deadline=None)
@given(st.data())
def test_a_block_is_rounded_as_in_the_whole(data):
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(0, size - start)) for size, start in zip(shape, starts, strict=True)]
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    box = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    if math.prod(sizes):
        assert torch.equal(rounded(whole[box].contiguous(), "w", shape, starts), rounded(whole, "w")[box])


def test_steps_names_and_seeds_draw_apart():
    values = torch.full((1000,), 1 + 2**-8)  # half way between two
    first, *others = (rounded(values, name, seed=seed) for name, seed in [("a", 0), ("b", 0), ("a", 1)])
    for other in others:
        assert 400 < int((first != other).sum()) < 600


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes", "rows"),
    [
        ((3, 4, 5), (0, 0, 0), (3, 4, 5), [Rows(0, 1, 60, 0)]),
        ((3, 4, 5), (1, 0, 0), (2, 4, 5), [Rows(20, 1, 40, 0)]),
        ((3, 4, 5), (1, 2, 0), (2, 2, 5), [Rows(30, 2, 10, 10)]),
        ((3, 4, 5), (1, 1, 2), (2, 2, 3), [Rows(27, 2, 3, 2), Rows(47, 2, 3, 2)]),
        ((), (), (), [Rows(0, 1, 1, 0)]),
        ((2**20, 2**20), (2**19, 7), (2, 3), [Rows(2**39 + 7, 2, 3, 2**20 - 3)]),
    ],
)
def test_rows_are_as_long_as_they_can_be(shape, offsets, sizes, rows):
    assert rows_of(shape, offsets, sizes) == rows


@settings(deadline=None)
@given(st.data())
def test_elements_are_numbered_as_in_the_whole(data):
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4))
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True)]
    whole = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    expected = whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))].flatten()
    limit = data.draw(st.integers(1, 40))
    pieces = [piece for rows in rows_of(shape, starts, sizes) for piece in rows.pieces(limit)]
    assert all(piece.elements <= limit for piece in pieces)
    found = [
        piece.first
        + element_numbers(
            piece.elements,
            torch.device("cpu"),
            *(torch.tensor(each, dtype=torch.int32) for each in (piece.columns, piece.gap) if piece.count > 1),
        )
        for piece in pieces
    ]
    assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize(
    ("rows", "limit", "pieces"),
    [
        (Rows(7, 1, 10, 0), 4, [Rows(7, 1, 4, 0), Rows(11, 1, 4, 0), Rows(15, 1, 2, 0)]),
        (Rows(7, 5, 3, 2), 7, [Rows(7, 2, 3, 2), Rows(17, 2, 3, 2), Rows(27, 1, 3, 2)]),
        (Rows(7, 2, 5, 1), 4, [Rows(7, 1, 4, 1), Rows(11, 1, 1, 1), Rows(13, 1, 4, 1), Rows(17, 1, 1, 1)]),
        (
            Rows(2**40, 4, 2**29, 2**35),
            2**30,
            [Rows(2**40, 2, 2**29, 2**35), Rows(2**40 + 2**36 + 2**30, 2, 2**29, 2**35)],
        ),
    ],
)
def test_pieces_are_whole_rows_or_parts_of_one(rows, limit, pieces):
    assert list(rows.pieces(limit)) == pieces


BITS = 2**20
LAGS = (1, 2, 3, 4, 8, 16, 64, 128, 1024, 4096)
KEYS = [rounding_key(seed, f"layers.{seed}.weight") for seed in range(6)] + [(1, 0, 0, 0), (-1, 0, 0, 0)]
"""Random ones, and the most regular increments."""


def drawn(key):
    return noise(torch.arange(BITS, dtype=torch.int32), torch.tensor(key, dtype=torch.int32))


def standard(bits):
    """With mean 0 and variance 1, if all 2¹⁶ values are as likely."""
    return (bits.double() - (2**16 - 1) / 2) / math.sqrt((2**32 - 1) / 12)


def deviation(counts):
    """Of equally likely classes from their expectation: normal with mean 0 and variance 1 for many classes."""
    expected, freedom = counts.sum() / len(counts), len(counts) - 1
    return float(((counts - expected).square().sum() / expected - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("key", KEYS)
def test_noise_is_spread_evenly_and_neighbours_are_independent(key):
    bits = drawn(key)
    assert (int(bits.min()), int(bits.max())) >= (0, 2**16 - 16)
    assert deviation(torch.bincount(bits, minlength=2**16).double()) < SIGMAS
    pairs = (bits[0::2] >> 8) * 256 + (bits[1::2] >> 8)
    assert deviation(torch.bincount(pairs, minlength=2**16).double()) < SIGMAS
    for bit in range(16):
        assert abs(float(((bits >> bit) & 1).double().mean()) - 0.5) < SIGMAS / 2 / math.sqrt(BITS)
    values = standard(bits)
    for lag in LAGS:
        assert abs(float((values[:-lag] * values[lag:]).mean())) < SIGMAS / math.sqrt(BITS), lag


def test_streams_of_steps_and_names_are_independent():
    values = [standard(drawn(rounding_key(0, f"{step}\0{name}"))) for step in range(3) for name in "ab"]
    for number, one in enumerate(values):
        for other in values[:number]:
            assert abs(float((one * other).mean())) < SIGMAS / math.sqrt(BITS)


@pytest.mark.parametrize("elements", [2**21, slow(10**8)])
def test_groups_of_one_hash_are_as_good_as_three_hashes(elements):
    """Each bit, each pair for one element and for neighbours, all three together, and the mean of what they round."""
    values = torch.tensor([1 + 2**-9, -3.14159, 0.1], dtype=torch.float32)
    bits, products, carried = (torch.zeros(size, dtype=torch.float64) for size in ((3, 16), (7,), (3, 3)))
    pairs = torch.zeros(6, 64 * 64, dtype=torch.float64)
    for first in range(0, elements, 2**20):
        numbers = torch.arange(first, min(first + 2**20, elements), dtype=torch.int32)
        drawn = noises(hashed(numbers, key("w")), 3)
        one, two, three = centred = [standard(group) for group in drawn]
        ahead = [group.roll(1) for group in drawn]
        of_pairs = [(0, 1), (0, 2), (1, 2)]
        products += torch.stack(
            [(centred[a] * centred[b]).sum() for a, b in of_pairs]
            + [(centred[a] * centred[b].roll(1)).sum() for a, b in of_pairs]
            + [(one * two * three).sum()]
        )
        for number, (a, b) in enumerate(of_pairs):
            for row, other in ((number, drawn[b]), (3 + number, ahead[b])):
                pairs[row] += torch.bincount((drawn[a] >> 10) * 64 + (other >> 10), minlength=64 * 64)
        for number, group in enumerate(drawn):
            bits[number] += torch.stack([((group >> bit) & 1).sum() for bit in range(16)])
            for each, value in enumerate(values):
                _, high = neighbours(value.item())
                carried[number, each] += (rounded_number(value.expand(len(group)), group) == high).sum()
    assert products.abs().max() < SIGMAS * math.sqrt(elements)
    assert (bits / elements - 0.5).abs().max() < SIGMAS / 2 / math.sqrt(elements)
    assert max(map(deviation, pairs)) < SIGMAS
    for each, value in enumerate(values.tolist()):
        low, high = neighbours(value)
        up = (value - low) / (high - low)
        assert (carried[:, each] / elements - up).abs().max() < SIGMAS * math.sqrt(up * (1 - up) / elements)


def test_every_bit_of_an_elements_number_changes_half_of_the_noise():
    draw = torch.Generator().manual_seed(0)
    starts = torch.randint(-(2**31), 2**31, (2**14,), generator=draw).to(torch.int32)
    bits = noise(starts, key("w"))
    for bit in range(32):
        flipped = noise(starts ^ int32(1 << bit), key("w")) ^ bits
        for place in range(16):
            assert abs(float(((flipped >> place) & 1).double().mean()) - 0.5) < 0.03, (bit, place)


def test_keys_are_odd_and_apart():
    found = [rounding_key(seed, name) for seed in range(30) for name in "abcdefgh"]
    assert len(set(found)) == len(found)
    assert all(increment % 2 and not last for increment, _, _, last in found)
