"""Initial weights as a function of only the seed, the global parameter name and the global element.

Any shard of any layout draws its own elements, bit-equal to the same elements of the whole: each tensor has a separate
stream of random numbers (:mod:`nxdt_core.models.random.streams`), and element ``i`` takes number ``i`` of the stream.
They
are drawn in float64, on the device or for devices without float64 on the host, and finally rounded to the parameter's
dtype. All device types therefore agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate

import torch

from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.errors.models import NoInitRule
from nxdt_core.models.patterns import matches, matches_any
from nxdt_core.models.random.positions import Rows, rows_of
from nxdt_core.models.random.quantiles import normal_quantiles, quantile_table
from nxdt_core.models.random.streams import Stream
from nxdt_core.protocols.initialisation import InitRule
from nxdt_core.protocols.model import ModelBuilder

__all__ = ["draw", "fill", "fresh_rules", "initialize", "rule_for"]

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


def fresh_rules(builder: ModelBuilder, names: Iterable[str]) -> tuple[InitRule, ...]:
    """Return a builder's rules, with those of the norms that its plan names: one, unless a rule makes them constant.

    Args:
        builder: of the model.
        names: of the model's parameters.
    """
    rules, norms = tuple(builder.init_rules()), builder.plan().norms
    left = [name for name in names if matches_any(norms, name) and _is_for_all(name, rules)]
    return (*(InitRule(pattern=name, distribution="constant", mean=1.0) for name in left), *rules)


def _is_for_all(name: str, rules: Sequence[InitRule]) -> bool:
    """Whether only the rule for all others is for a parameter, or none."""
    first = next((rule for rule in rules if matches(rule.pattern, name)), None)
    return first is None or (first.pattern == "*" and first.distribution != "constant")


def rule_for(name: str, rules: Sequence[InitRule]) -> InitRule:
    """Return the first of ``rules`` that matches a parameter's global name.

    Raises:
        NoInitRule: none does.
    """
    rule = next((rule for rule in rules if matches(rule.pattern, name)), None)
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
        shape: of the whole parameter.
        rule: the distribution.
        name: the parameter's global name.
        seed: the run's.
        dtype: of the result.
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
        rule: the distribution.
        name: the parameter's global name.
        seed: the run's.
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
        direct = block.is_contiguous() and device == block.device
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
