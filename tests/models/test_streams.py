"""Random numbers by position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdt_core.models.random.init import Stream

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_WORD = 2**64


def bits(stream: Stream, indices: torch.Tensor, first: int = 0) -> torch.Tensor:
    return stream.bits(stream.terms(indices), first, (torch.empty_like(indices), torch.full_like(indices, -1)))


def reference(start: int, gamma: int, index: int) -> int:
    """SplitMix64 in whole numbers of any size."""
    z = (start + (index + 1) * gamma) % _WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % _WORD
    return z ^ (z >> 31)


def test_the_published_sequence_of_splitmix64_comes_out():
    found = bits(Stream(1234567, _GOLDEN_GAMMA), torch.arange(5))
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
    found = bits(Stream(start, gamma), torch.tensor(indices), first)
    assert [int(b) % _WORD for b in found] == [reference(start, gamma, first + i) for i in indices]


def test_a_number_depends_on_its_index_alone():
    stream = Stream.of(1, "w")
    whole = bits(stream, torch.arange(1000))
    shuffled = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(bits(stream, shuffled), whole[shuffled])
    assert torch.equal(bits(stream, torch.arange(3), 997), whole[997:])


def test_uniform_numbers_never_reach_the_ends_and_are_exact_near_them(monkeypatch):
    extremes = torch.tensor([0, 4095, -1, 2**63 - 1, -(2**63), 2**62])
    monkeypatch.setattr(Stream, "bits", lambda self, *arguments: extremes.clone())
    tails = Stream(0, 1).tails(extremes, 0, (), out=torch.empty(6, dtype=torch.float64))
    step = 2.0**-52
    assert tails.tolist() == [step / 2, step / 2, -step / 2, 0.5 - step / 2, -0.5 + step / 2, 0.25 + step / 2]


@pytest.mark.parametrize("seed", [0, 1, 1234, 2**63])
def test_increments_are_odd_and_irregular(seed):
    for number in range(500):
        gamma = Stream.of(seed, f"layers.{number}.weight").gamma
        assert gamma % 2 == 1
        assert (gamma ^ (gamma >> 1)).bit_count() >= 24


def test_seed_and_name_choose_the_stream():
    assert len({Stream.of(seed, name) for seed in range(30) for name in "abcdefgh"}) == 240
