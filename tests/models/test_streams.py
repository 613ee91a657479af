"""Random numbers by position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdt_core.models.random import init
from nxdt_core.models.random.init import draw, stream_bits, stream_of
from nxdt_core.protocols.plan import InitRule

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_WORD = 2**64


def reference(start: int, gamma: int, index: int) -> int:
    """SplitMix64 in whole numbers of any size."""
    z = (start + (index + 1) * gamma) % _WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % _WORD
    return z ^ (z >> 31)


def test_the_published_sequence_of_splitmix64_comes_out():
    found = stream_bits(torch.arange(5), (1234567, _GOLDEN_GAMMA))
    assert [int(b) % _WORD for b in found] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@settings(deadline=None)
@given(
    st.integers(0, _WORD - 1),
    st.integers(0, _WORD // 2 - 1),
    st.integers(0, 2**48),
    st.lists(st.integers(0, 2**48), min_size=1),
)
def test_wrapping_arithmetic_agrees_with_whole_numbers(start, half, first, indices):
    gamma = 2 * half + 1
    found = stream_bits(torch.tensor(indices) + first, (start, gamma))
    assert [int(b) % _WORD for b in found] == [reference(start, gamma, first + i) for i in indices]


def test_a_number_depends_on_its_index_alone():
    stream = stream_of(1, "w")
    whole = stream_bits(torch.arange(1000), stream)
    shuffled = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(stream_bits(shuffled, stream), whole[shuffled])
    assert torch.equal(stream_bits(torch.arange(997, 1000), stream), whole[997:])


def test_uniform_numbers_never_reach_the_ends_and_are_exact_near_them(monkeypatch):
    extremes = torch.tensor([0, 4095, -1, 2**63 - 1, -(2**63), 2**62])
    monkeypatch.setattr(init, "stream_bits", lambda numbers, stream: extremes.clone())
    monkeypatch.setattr(init, "normal_quantiles", lambda tails: tails)
    tails = draw((6,), InitRule(pattern="*", distribution="normal", std=1.0), name="w", seed=1, dtype=torch.float64)
    step = 2.0**-52
    assert tails.tolist() == [step / 2, step / 2, -step / 2, 0.5 - step / 2, -0.5 + step / 2, 0.25 + step / 2]


@pytest.mark.parametrize("seed", [0, 1, 1234, 2**63])
def test_increments_are_odd_and_irregular(seed):
    for number in range(500):
        _, gamma = stream_of(seed, f"layers.{number}.weight")
        assert gamma % 2 == 1
        assert (gamma ^ (gamma >> 1)).bit_count() >= 24


def test_seed_and_name_choose_the_stream():
    assert len({stream_of(seed, name) for seed in range(30) for name in "abcdefgh"}) == 240
