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
from collections.abc import Iterable, Sequence
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
from nxdt_core.models.random.positions import Rows, rows_of
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.plan import InitRule

__all__ = [
    "Stream",
    "complete_init_rules",
    "draw",
    "fill",
    "initialize",
    "normal_quantiles",
    "quantile_table",
    "rule_for",
]

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
            first: index in the stream of the first number.
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


def quantile_table(device: torch.device) -> torch.Tensor:
    """Return coefficients of quantile / probability, float64 [degree + 1, entries], constants first.

    The variable is the distance from a polynomial's middle, where probabilities are scaled to [1, 2).
    """
    return torch.from_numpy(_coefficients()).to(device)


@functools.cache
def _coefficients() -> NDArray[np.float64]:
    """Memory that stays, 640 KiB, and no tensor, so that the tensors of a process are those of its run."""
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


def normal_quantiles(
    tails: torch.Tensor, table: torch.Tensor, *, words: Sequence[torch.Tensor], spare: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the quantile of each probability, float64 in the first of ``spare``.

    Args:
        tails: float64, from 2⁻⁵³ to a half: of what is below; where negative, of what is above.
        table: :func:`quantile_table`, on their device.
        words: two buffers of int64.
        spare: two buffers of float64.
    """
    index, offset = words
    result, buffer = spare
    bits = tails.view(torch.int64)
    torch.bitwise_right_shift(bits, 52 - _BITS, out=index).bitwise_and_(_ENTRIES - 1)
    torch.bitwise_and(bits, _FRACTION, out=offset).bitwise_or_(_ONE)
    distance = offset.view(torch.float64).sub_(1 + 2.0 ** -(_BITS + 1))
    *others, highest = table.unbind()
    torch.index_select(highest, 0, index, out=result)
    for coefficients in reversed(others):
        result.mul_(distance).add_(torch.index_select(coefficients, 0, index, out=buffer))
    return result.mul_(tails)


_TILE_ON_HOST = 1 << 15
"""Elements that are drawn at a time, in a core's cache. For more, each operation of torch would use several threads."""
_TILE = 1 << 23
"""Elsewhere, where each tile costs some launches: 64 MiB in each of six buffers."""


def initialize(named_parameters: Iterable[tuple[str, torch.Tensor]], rules: Sequence[InitRule], seed: int) -> None:
    """Fill whole parameters in place, each by the first of ``rules`` that matches its name.

    Raises:
        NoInitRule: no rule matches a parameter.
    """
    for name, parameter in named_parameters:
        fill(parameter, rule_for(name, rules), name=name, seed=seed)


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
            first = _first_of(rules, name)
            if first is None or (first.pattern == "*" and first.distribution != "constant"):  # the rule for all others
                ones.append(InitRule(pattern=name, distribution="constant", mean=1.0))
    return (*ones, *rules)


def _first_of(rules: Sequence[InitRule], name: str) -> InitRule | None:
    return next((rule for rule in rules if matches(rule.pattern, name)), None)


def rule_for(name: str, rules: Sequence[InitRule]) -> InitRule:
    """Return the first of ``rules`` that matches a parameter's global name.

    Raises:
        NoInitRule: none does.
    """
    rule = _first_of(rules, name)
    if rule is None:
        raise NoInitRule(parameter=name, patterns=[rule.pattern for rule in rules])
    return rule


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
    """Draw a parameter or one block of it.

    Args:
        shape: shape of the whole parameter.
        rule: distribution, mean and standard deviation.
        name: the parameter's global name.
        seed: the run's, from which all initial weights follow.
        dtype: dtype of the result.
        offsets: where the block starts, one number per dimension; None for the origin.
        local_shape: size of the block; None for everything from ``offsets`` on.

    Returns:
        A tensor of ``local_shape`` on the CPU.

    Raises:
        ValueError: the block is not within ``shape``.
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
    elif block.numel():
        device = block.device if profile_of(block.device).float64 else HOST
        direct = block.is_contiguous() and device == block.device and not isinstance(block, QuantisedWeight)
        drawn = block if direct else torch.empty(sizes, dtype=block.dtype, device=device)
        parts = rows_of(shape, starts, sizes)
        for flat, rows in zip(drawn.view(-1).chunk(len(parts)), parts, strict=True):
            _draw(flat, rows, Stream.of(seed, name), rule)
        if not direct:
            block.copy_(drawn)


def _draw(flat: torch.Tensor, rows: Rows, stream: Stream, rule: InitRule) -> None:
    """Draw the elements of ``rows`` tile by tile. Each thread of a host takes the next tile, since torch would leave a
    core's cache between two operations, and start and join threads for each."""
    host = profile_of(flat.device).host
    tiles = list(rows.pieces(_TILE_ON_HOST if host else _TILE))
    terms = stream.terms(replace(tiles[0], first=0).numbers(flat.device))
    table = quantile_table(flat.device)
    due = iter(list(zip(tiles, accumulate(tile.elements for tile in tiles), strict=True)))

    def work() -> None:
        with torch._C.DisableTorchFunction(), torch.inference_mode():  # torch function modes make each call slow
            integers = torch.empty(2, len(terms), dtype=torch.int64, device=flat.device)
            floats = torch.empty(3, len(terms), dtype=torch.float64, device=flat.device)
            for tile, end in due:
                words, (tails, *spare) = integers[:, : tile.elements].unbind(), floats[:, : tile.elements].unbind()
                stream.tails(terms[: tile.elements], tile.first, words, out=tails)
                shaped = _shaped(tails, rule, table, words=words, spare=spare)
                flat[end - tile.elements : end].copy_(shaped.add_(rule.mean))

    threads = min(torch.get_num_threads(), len(tiles)) if host else 1
    if threads == 1:
        work()
    else:
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(work) for _ in range(threads)]:
                done.result()


def _shaped(
    tails: torch.Tensor,
    rule: InitRule,
    table: torch.Tensor,
    *,
    words: Sequence[torch.Tensor],
    spare: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Values of the rule's distribution less its mean, by its inverse, from ``tails``, which are overwritten."""
    if rule.distribution == "uniform":
        return tails.mul_(2).sub_(torch.sign(tails, out=spare[0])).mul_(rule.std)
    if rule.distribution == "truncated_normal":
        below = 0.5 * math.erfc(rule.truncate_at / math.sqrt(2))  # probability of what is cut on one side
        tails.mul_(1 - 2 * below).add_(torch.sign(tails, out=spare[0]).mul_(below))
    return normal_quantiles(tails, table, words=words, spare=spare).mul_(rule.std)
