"""Stochastic rounding by random numbers that depend on the positions of elements in the whole parameter.

Stochastic rounding of float32 to bfloat16 (Gupta et al. 2015, arXiv:1502.02551): a value between two neighbours goes to
the upper one with the probability that makes its mean exact. Sums of steps that are each too small for bfloat16 are
then right, where rounding to nearest loses each of them. It is element-wise arithmetic on 32-bit numbers, which a
compiler merges with what computes the values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from nxdt_core.models.random.init import rows_of

KEY_WORDS = 4
"""32-bit words of a key. The last is 0, so that each key in a table starts at a multiple of 16 bytes, where
accelerators load fastest."""
_LOW_BITS = 0xFFFF
"""Bits that a float32 has and a bfloat16 lacks."""
_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B - (1 << 32)
"""Factors of the 32-bit mixing function that Wellons found by search (https://github.com/skeeto/hash-prospector, the
public domain ``lowbias32``)."""
_MULTIPLIER_3 = 0x9E3779B1 - (1 << 32)
"""Odd and near 2³² divided by the golden ratio (Knuth, The Art of Computer Programming, section 6.4)."""


def rounding_key(seed: int, name: str) -> tuple[int, int, int, int]:
    """Return the key of one tensor in one step, as int32: an odd increment and two offsets, 96 bits of BLAKE2b."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=12).digest()
    increment, first, second = (int.from_bytes(digest[at : at + 4], "little", signed=True) for at in (0, 4, 8))
    return increment | 1, first, second, 0


def element_numbers(
    elements: int, device: torch.device, columns: torch.Tensor | None = None, gap: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the numbers of consecutive elements of a block in the whole parameter, counted from the block's first
    element, modulo 2³², int32 [elements].

    Args:
        elements: how many, fewer than 2³¹.
        device: of the result.
        columns: int32 scalar, elements of a row, where rows do not follow each other in the whole; the first element
            then begins a row.
        gap: int32 scalar, elements of the whole between two rows; given with ``columns``.
    """
    # Tensors, since ints that vary from call to call have 64 bits in Triton, and so would all that follows from them.
    index = torch.arange(elements, dtype=torch.int32, device=device)
    return index if columns is None or gap is None else index + index.div(columns, rounding_mode="trunc") * gap


def hashed(numbers: torch.Tensor, key: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """Return 32 random bits for each element, int32 of the shape of ``numbers``, for :func:`noises`.

    Args:
        numbers: int32, see :func:`element_numbers`.
        key: three int32 scalars or more, see :func:`rounding_key`.
    """
    bits = (numbers * key[0]).add_(key[1])  # int32 wraps modulo 2³²
    bits.bitwise_xor_((bits >> 16).bitwise_and_(_LOW_BITS)).mul_(_MULTIPLIER_1)
    return bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).add_(key[2]).mul_(_MULTIPLIER_2)


def noises(bits: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return up to three groups of 16 random bits for each element, int32, from one :func:`hashed`, in its place.

    The high half, the low half once the high one is mixed in, and the high half of a product of both: for three
    roundings of an element, this takes a third of the operations of three hashes.
    """
    if count == 1:
        return [bits.bitwise_right_shift_(16).bitwise_and_(_LOW_BITS)]
    high = (bits >> 16).bitwise_and_(_LOW_BITS)
    product = (bits.bitwise_xor_(high) * _MULTIPLIER_3).bitwise_right_shift_(16).bitwise_and_(_LOW_BITS)
    return [high, bits.bitwise_and_(_LOW_BITS), product][:count]


def noise(numbers: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return 16 random bits for each element: the first group of :func:`noises`."""
    return noises(hashed(numbers, key), 1)[0]


def rounded(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return float32 ``values`` rounded by :func:`noise` to values of bfloat16, as float32.

    Exact up to the 2⁻¹⁶ of a step that float32 resolves there; what bfloat16 can represent stays as it is, and so do
    infinities and NaN.
    """
    return rounded_number(values, torch.where(values == values, noise, 0))


def rounded_block(
    values: torch.Tensor, *, seed: int, name: str, shape: Sequence[int], offsets: Sequence[int]
) -> torch.Tensor:
    """Return :func:`rounded` values of the block at ``offsets`` of a parameter of ``shape``, by the numbers of the
    elements in the whole parameter and the :func:`rounding_key` of ``seed`` and ``name``."""
    key = torch.tensor(rounding_key(seed, name), dtype=torch.int32)
    numbers = torch.cat([rows.numbers(values.device) for rows in rows_of(shape, offsets, values.shape)])
    return rounded(values, noise(numbers.to(torch.int32).view(values.shape), key))


def rounded_number(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Compute :func:`rounded` of values without NaN, or with noise 0 for each: a NaN of all ones would overflow into a
    zero."""
    return (values.view(torch.int32) + noise).bitwise_and_(~_LOW_BITS).view(torch.float32)
