"""Random numbers by position: SplitMix64 (Steele, Lea & Flood 2014, doi:10.1145/2660193.2660195) as a function of the
index, one stream for each (seed, name)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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

    def terms(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the products with the increment that :meth:`bits` adds to, for ``numbers`` (int64)."""
        return numbers * _signed(self.gamma)  # int64 wraps modulo 2⁶⁴

    def bits(self, terms: torch.Tensor, first: int, words: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return 64 random bits per element, as int64 of the same pattern, in the first of ``words``.

        Args:
            terms: :meth:`terms` of the elements' numbers, less ``first``.
            first: of the stream's numbers.
            words: two buffers of int64, as large as ``terms``.
        """
        mixed, spare = words
        torch.add(terms, _signed((self.start + (first + 1) * self.gamma) % (1 << 64)), out=mixed)
        _xor_shifted(mixed, 30, spare).mul_(_signed(_MULTIPLIER_1))
        _xor_shifted(mixed, 27, spare).mul_(_signed(_MULTIPLIER_2))
        return _xor_shifted(mixed, 31, spare)

    def tails(
        self, terms: torch.Tensor, first: int, words: Sequence[torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        """Return the uniform number ``u`` in (0, 1) of each element: ``u`` itself up to a half, else ``u - 1``.

        They are float64 in ``out``, midpoints of 2⁵² equal parts. So neither end is reached, and what is near an end is
        exact. Other arguments as for :meth:`bits`.
        """
        return out.copy_(self.bits(terms, first, words).bitwise_right_shift_(12)).add_(0.5).mul_(2.0**-52)


def _signed(value: int) -> int:
    """The int64 with the bit pattern of an unsigned 64-bit value."""
    return value - (1 << 64) if value >> 63 else value


def _xor_shifted(values: torch.Tensor, count: int, spare: torch.Tensor) -> torch.Tensor:
    """Combine ``values`` with themselves shifted to the right, in place. Torch's shift copies the sign: masked off."""
    torch.bitwise_right_shift(values, count, out=spare)
    return values.bitwise_xor_(spare.bitwise_and_((1 << (64 - count)) - 1))
