"""Initial weights as a function of only the seed, the global parameter name and the global element.

Any shard of any layout draws its own elements, bit-equal to the same elements of the whole: each tensor has a separate
stream of random numbers, SplitMix64 (Steele, Lea & Flood 2014, doi:10.1145/2660193.2660195) as a function of the index,
and element ``i`` takes number ``i`` of the stream. They are drawn in float64, on the device or for devices without
float64 on the host, and finally rounded to the parameter's dtype. All device types therefore agree.

Quantiles of the normal distribution come from a table of polynomials: only products and sums follow a look-up, and
every device rounds these in the same way. All device types with float64 therefore get the same bits. torch's
``special.ndtri`` computes element by element on a CPU, and takes twice as long.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.errors.models import NoInitRule
from nxdt_core.models.patterns import matches, matches_any
from nxdt_core.models.quantised import QuantisedWeight
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.plan import InitRule

_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Shift and factor of each round of mixing."""
_MIXED_GAMMA_BITS = 24
"""Fewest changes between neighbouring bits of an increment; more regular ones give correlated numbers (section 5 of
the paper)."""
_BITS = 8
"""Each octave of probabilities has 2⁸ polynomials."""
_DEGREE = 4
"""Degree of the polynomials, whose error is then below 1e-14, as that of ``ndtri`` is."""
_ENTRIES = 64 << _BITS
"""Number of octave and polynomial, modulo 64 octaves. Probabilities from 2⁻⁵³ to a half have 52."""
_FRACTION = (1 << (52 - _BITS)) - 1
"""Bits of a float64 below those that number the polynomials of an octave."""
_ONE = 0x3FF << 52
"""Bits of 1 as float64."""
_TILE_ON_HOST = 1 << 15
"""Elements that are drawn at a time, in a core's cache. For more, each operation of torch would use several threads."""
_TILE = 1 << 23
"""Elsewhere, where each tile costs some launches: 64 MiB in each temporary tensor."""


def complete_init_rules(builder: ModelBuilder, names: Iterable[str]) -> tuple[InitRule, ...]:
    """Return a builder's rules, with those of the norms that its plan names: one, unless a rule makes them constant.

    Args:
        builder: gives the rules and the plan.
        names: global names of all parameters of the model.
    """
    rules, norms = tuple(builder.init_rules()), builder.plan().norms
    ones = []
    for name in names:
        if matches_any(norms, name):
            first = next((rule for rule in rules if matches(rule.pattern, name)), None)
            if first is None or (first.pattern == "*" and first.distribution != "constant"):  # the rule for all others
                ones.append(InitRule(pattern=name, distribution="constant", mean=1.0))
    return (*ones, *rules)


def rule_for(name: str, rules: Sequence[InitRule]) -> InitRule:
    """Return the first of ``rules`` that matches a parameter's global name.

    Raises:
        NoInitRule: none does.
    """
    for rule in rules:
        if matches(rule.pattern, name):
            return rule
    raise NoInitRule(parameter=name, patterns=[rule.pattern for rule in rules])


def initialize(named_parameters: Iterable[tuple[str, torch.Tensor]], rules: Sequence[InitRule], seed: int) -> None:
    """Fill whole parameters in place, each by the first of ``rules`` that matches its name.

    Raises:
        NoInitRule: no rule matches a parameter.
    """
    for name, parameter in named_parameters:
        fill(parameter, rule_for(name, rules), name=name, seed=seed)


def draw(
    shape: Sequence[int],
    rule: InitRule,
    *,
    name: str,
    seed: int,
    dtype: torch.dtype = torch.float32,
    offsets: Sequence[int] | None = None,
    local_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return a parameter or one block of it, on the CPU; the other arguments are those of :func:`fill`.

    Args:
        shape: shape of the whole parameter.
        rule: distribution, mean and standard deviation.
        name: the parameter's global name.
        seed: the run's, from which all initial weights follow.
        dtype: dtype of the result.
        offsets: where the block starts, one number per dimension; None for the origin.
        local_shape: size of the block; None for everything from ``offsets`` on.
    """
    starts = tuple(offsets) if offsets is not None else (0,) * len(shape)
    sizes = tuple(local_shape) if local_shape is not None else tuple(n - o for n, o in zip(shape, starts, strict=True))
    block = torch.empty(sizes, dtype=dtype, device=HOST)
    fill(block, rule, name=name, seed=seed, shape=shape, offsets=starts)
    return block


@torch.no_grad()
def fill(
    block: torch.Tensor,
    rule: InitRule,
    *,
    name: str,
    seed: int,
    shape: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
) -> None:
    """Draw a parameter or one block of it into ``block``, on its device where that has float64, else on the host.

    Args:
        block: on any device.
        rule: distribution, mean and standard deviation.
        name: the parameter's global name.
        seed: the run's, from which all initial weights follow.
        shape: of the whole parameter; None for that of ``block``.
        offsets: where the block starts, one number per dimension; None for the origin.

    Raises:
        ValueError: the block is not within ``shape``.
    """
    sizes = tuple(block.shape)
    shape, starts = tuple(sizes if shape is None else shape), tuple(offsets or (0,) * len(sizes))
    if any(o < 0 or o + n > whole for whole, o, n in zip(shape, starts, sizes, strict=True)):
        raise ValueError(f"{name}: a block of {sizes} at {starts} is not within {shape}")
    if rule.distribution == "constant":
        block.fill_(rule.mean)
    if rule.distribution == "constant" or not block.numel():
        return
    device = block.device if profile_of(block.device).float64 else HOST
    direct = block.is_contiguous() and device == block.device and not isinstance(block, QuantisedWeight)
    values = block if direct else torch.empty(sizes, dtype=block.dtype, device=device)
    stream, on_host = stream_of(seed, name), profile_of(device).host
    parts = rows_of(shape, starts, sizes)
    for flat, rows in zip(values.view(-1).chunk(len(parts)), parts, strict=True):
        tiles = list(rows.pieces(_TILE_ON_HOST if on_host else _TILE))
        ends = list(accumulate(tile.elements for tile in tiles))
        numbers = replace(tiles[0], first=0).numbers(device)
        draw_tile = functools.partial(_draw_tile, flat, numbers, stream, rule)
        if on_host and len(tiles) > 1:
            # Each thread takes the next tile: torch would leave a core's cache between two operations, and start and
            # join threads for each.
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                list(pool.map(draw_tile, tiles, ends))
        else:
            list(map(draw_tile, tiles, ends))
    if not direct:
        block.copy_(values)


def _draw_tile(
    flat: torch.Tensor, numbers: torch.Tensor, stream: tuple[int, int], rule: InitRule, tile: Rows, end: int
) -> None:
    """Write the values of ``tile`` to ``flat`` up to ``end``, by the inverse of the rule's distribution.

    The uniform number ``u`` in (0, 1) of an element is ``u`` itself up to a half, else ``u - 1``. These are midpoints
    of 2⁵² equal parts, so that neither end is reached, and what is near an end is exact.
    """
    with torch._C.DisableTorchFunction(), torch.inference_mode():  # torch function modes make each call slow
        bits = stream_bits(numbers[: tile.elements] + tile.first, stream)
        tails = bits.bitwise_right_shift_(12).double().add_(0.5).mul_(2.0**-52)
        if rule.distribution == "uniform":
            values = tails.mul_(2).sub_(torch.sign(tails))
        else:
            if rule.distribution == "truncated_normal":
                below = 0.5 * math.erfc(rule.truncate_at / math.sqrt(2))  # probability of what is cut on one side
                tails.mul_(1 - 2 * below).add_(torch.sign(tails).mul_(below))
            values = normal_quantiles(tails)
        flat[end - tile.elements : end].copy_(values.mul_(rule.std).add_(rule.mean))


@dataclass(frozen=True, slots=True)
class Rows:
    """Equally long runs of elements that follow each other in a block and in the whole parameter."""

    first: int
    """Number of the first row's first element in the whole parameter, row-major."""
    count: int
    columns: int
    """Elements of a row."""
    gap: int
    """Elements of the whole parameter between a row's last element and the next row's first."""

    @property
    def elements(self) -> int:
        """Elements of all rows."""
        return self.count * self.columns

    def numbers(self, device: torch.device) -> torch.Tensor:
        """Return the elements' numbers in the whole parameter, int64 [elements]."""
        places = torch.arange(self.elements, dtype=torch.int64, device=device)
        return places + places.div(self.columns, rounding_mode="floor").mul_(self.gap).add_(self.first)

    def pieces(self, limit: int) -> Iterator[Rows]:
        """Yield these rows in their order, at most ``limit`` elements at a time: whole rows, or a part of one."""
        height, width = max(1, limit // self.columns), min(limit, self.columns)
        for row in range(0, self.count, height):
            for column in range(0, self.columns, width):
                first = self.first + row * (self.columns + self.gap) + column
                yield Rows(first, min(height, self.count - row), min(width, self.columns - column), self.gap)


def rows_of(shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int]) -> list[Rows]:
    """Return the rows of a block, equally many in each item.

    One item, and in it one row where the block has no gaps, but for a block that is cut along three dimensions or more.

    Args:
        shape: shape of the whole parameter.
        starts: where the block starts, one number per dimension.
        sizes: shape of the block.
    """
    # Dimensions that are taken whole are merged into the one before. Mostly one or two remain, and each costs a
    # division per element.
    merged = [(1, 0, 1)]
    for extent, start, size in zip(shape, starts, sizes, strict=True):
        if (start, size) == (0, extent):
            extent_before, start_before, size_before = merged[-1]
            merged[-1] = (extent_before * extent, start_before * extent, size_before * size)
        elif merged[-1] == (1, 0, 1):
            merged[-1] = (extent, start, size)
        else:
            merged.append((extent, start, size))
    shape, starts, sizes = zip(*merged, strict=True)
    if len(shape) == 1:
        return [Rows(starts[0], 1, sizes[0], 0)]
    *outer, count, columns = sizes
    whole = math.prod(shape[-2:])
    first = starts[-2] * shape[-1] + starts[-1]
    numbers = [0]
    for extent, start, size in zip(shape[:-2], starts, outer, strict=False):
        numbers = [number * extent + start + along for number in numbers for along in range(size)]
    return [Rows(number * whole + first, count, columns, shape[-1] - columns) for number in numbers]


def stream_of(seed: int, name: str) -> tuple[int, int]:
    """Return the stream of a parameter, start and increment: 128 bits of BLAKE2b over both.

    The increment is odd, so that the period is 2⁶⁴; each stream has another, so that none is a shifted copy."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=16).digest()
    gamma = int.from_bytes(digest[8:], "little") | 1
    if (gamma ^ (gamma >> 1)).bit_count() < _MIXED_GAMMA_BITS:
        gamma ^= 0xAAAAAAAAAAAAAAAA
    return int.from_bytes(digest[:8], "little"), gamma


def stream_bits(numbers: torch.Tensor, stream: tuple[int, int]) -> torch.Tensor:
    """Return 64 random bits per element, as int64 of the same pattern: the mixed values of
    ``start + (number + 1) * increment`` modulo 2⁶⁴."""
    start, gamma = stream
    bits = numbers * _signed(gamma) + _signed((start + gamma) % (1 << 64))  # int64 wraps modulo 2⁶⁴
    for shift, factor in _ROUNDS:
        bits ^= (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # torch's shift copies the sign: masked off
        bits *= _signed(factor)
    return bits


def _signed(value: int) -> int:
    """Return the int64 with the bit pattern of an unsigned 64-bit value."""
    return value - (1 << 64) if value >> 63 else value


def normal_quantiles(tails: torch.Tensor) -> torch.Tensor:
    """Return the quantile of each probability, float64: from 2⁻⁵³ to a half of what is below; where negative, of what
    is above."""
    table, bits = torch.from_numpy(_quantile_table()).to(tails.device), tails.view(torch.int64)
    index = (bits >> (52 - _BITS)).bitwise_and_(_ENTRIES - 1)
    distance = (bits & _FRACTION).bitwise_or_(_ONE).view(torch.float64).sub_(1 + 2.0 ** -(_BITS + 1))
    result = table[_DEGREE].index_select(0, index)
    for degree in reversed(range(_DEGREE)):
        result.mul_(distance).add_(table[degree].index_select(0, index))
    return result.mul_(tails)


@functools.cache
def _quantile_table() -> NDArray[np.float64]:
    """Return coefficients of quantile / probability, [degree + 1, entries], constants first.

    The variable is the distance from a polynomial's middle, where probabilities are scaled to [1, 2). An
    array of 640 KiB stays, and not a tensor, so that the tensors of a process are those of its run.
    """
    first = torch.arange((1023 - 53) << _BITS, (1023 - 1) << _BITS, device=HOST)
    begins, ends = ((numbers << (52 - _BITS)).view(torch.float64) for numbers in (first, first + 1))
    powers = torch.arange(_DEGREE + 1, dtype=torch.float64, device=HOST)
    nodes = torch.cos((powers + 0.5) * (math.pi / (_DEGREE + 1)))  # of Chebyshev, in (-1, 1)
    probabilities = begins + (ends - begins) * (nodes.unsqueeze(1) + 1) / 2
    values = torch.special.ndtri(probabilities) / probabilities
    solution = torch.linalg.solve(nodes.unsqueeze(1) ** powers, values)
    table = np.zeros((_DEGREE + 1, _ENTRIES))
    table[:, (first % _ENTRIES).numpy()] = (solution * (2.0 ** (_BITS + 1)) ** powers.unsqueeze(1)).numpy()
    return table
