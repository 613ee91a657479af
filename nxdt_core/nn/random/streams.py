"""Random numbers by position: SplitMix64 (Steele, Lea & Flood 2014, doi:10.1145/2660193.2660195) as a function of the
index, one stream for each (seed, name)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

__all__ = ["Stream"]

_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_MIXED_GAMMA_BITS = 24
"""Fewest changes between neighbouring bits of an increment; more regular ones give correlated numbers (section 5 of
the paper)."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Number ``i`` of the stream is the mixed value of ``start + (i + 1) * gamma`` modulo 2⁶⁴."""

    start: int
    gamma: int
    """Odd, so that the stream's period is 2⁶⁴; each stream has its own, so that none is a shifted copy of another."""

    @classmethod
    def of(cls, seed: int, name: str) -> Stream:
        """Return the stream of a parameter: 128 bits of BLAKE2b over both."""
        digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=16).digest()
        gamma = int.from_bytes(digest[8:], "little") | 1
        if (gamma ^ (gamma >> 1)).bit_count() < _MIXED_GAMMA_BITS:
            gamma ^= 0xAAAAAAAAAAAAAAAA
        return cls(int.from_bytes(digest[:8], "little"), gamma)

    def bits(self, indices: torch.Tensor) -> torch.Tensor:
        """64 random bits for each of ``indices`` (int64), as int64 of the same pattern."""
        mixed = indices.add(1).mul_(_signed(self.gamma)).add_(_signed(self.start))  # int64 wraps modulo 2⁶⁴
        mixed.bitwise_xor_(_shifted(mixed, 30)).mul_(_signed(_MULTIPLIER_1))
        mixed.bitwise_xor_(_shifted(mixed, 27)).mul_(_signed(_MULTIPLIER_2))
        return mixed.bitwise_xor_(_shifted(mixed, 31))

    def uniform(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the numbers in (0, 1), both ends excluded, float64: midpoints of 2⁵² equal parts.

        (With 53 bits the half would not fit: the largest would round to 1, whose normal quantile is infinite.)
        """
        return _shifted(self.bits(indices), 12).to(torch.float64).add_(0.5).mul_(2.0**-52)


def _signed(value: int) -> int:
    """The int64 with the bit pattern of an unsigned 64-bit value."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(values: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift to the right: torch's is arithmetic, so the copies of the sign are masked off."""
    return (values >> count).bitwise_and_((1 << (64 - count)) - 1)
