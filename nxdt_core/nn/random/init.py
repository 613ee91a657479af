"""Initial weights as a function of only the seed, the global parameter name and the global element.

Any shard of any layout draws its own elements, bit-equal to the same elements of the whole: each tensor has a separate
stream of random numbers (:mod:`nxdt_core.nn.random.streams`), and element ``i`` takes number ``i`` of the stream. They
are drawn on the host in float64 and finally rounded to the parameter's dtype. All device types therefore agree, also
those without float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from nxdt_core.devices import HOST
from nxdt_core.errors.models import NoInitRule
from nxdt_core.nn.patterns import matches
from nxdt_core.nn.random.positions import positions
from nxdt_core.nn.random.streams import Stream
from nxdt_core.protocols.initialisation import InitRule

__all__ = ["draw", "initialize", "rule_for"]


def initialize(named_parameters: Iterable[tuple[str, torch.Tensor]], rules: Sequence[InitRule], seed: int) -> None:
    """Fill whole parameters in place, each by the first of ``rules`` that matches its name.

    Raises:
        NoInitRule: no rule matches a parameter.
    """
    for name, parameter in named_parameters:
        rule = rule_for(name, rules)
        with torch.no_grad():
            parameter.copy_(draw(parameter.shape, rule, name=name, seed=seed, dtype=parameter.dtype))


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
    shape = tuple(shape)
    starts = tuple(offsets) if offsets is not None else (0,) * len(shape)
    sizes = tuple(local_shape) if local_shape is not None else tuple(n - o for n, o in zip(shape, starts, strict=True))
    if any(o < 0 or n < 0 or o + n > whole for whole, o, n in zip(shape, starts, sizes, strict=True)):
        raise ValueError(f"{name}: a block of {sizes} at {starts} is not within {shape}")
    block = torch.empty(sizes, dtype=dtype, device=HOST)
    if rule.distribution == "constant":
        return block.fill_(rule.mean)
    stream = Stream.of(seed, name)
    flat = block.view(-1)
    for part, indices in positions(shape, starts, sizes, device=HOST):
        flat[part] = _shaped(stream.uniform(indices), rule).to(dtype)
    return block


def _shaped(uniform: torch.Tensor, rule: InitRule) -> torch.Tensor:
    """Values of the rule's distribution by its inverse, from ``uniform`` in (0, 1), which is overwritten."""
    if rule.distribution == "uniform":
        return uniform.mul_(2).sub_(1).mul_(rule.std).add_(rule.mean)
    if rule.distribution == "truncated_normal":
        below = 0.5 * math.erfc(rule.truncate_at / math.sqrt(2))  # probability of what is cut on one side
        uniform.mul_(1 - 2 * below).add_(below)
    standard: torch.Tensor = torch.special.ndtri(uniform)
    return standard.mul_(rule.std).add_(rule.mean)
