"""Matching of dotted module and parameter paths against the patterns of plans, initialisation rules and groups; the
modules that a plan names by patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from torch import nn

from nxdt_core.protocols.plan import ParallelPlan, TensorStyle


@lru_cache(maxsize=1024)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    expressions = []
    for pattern in patterns:
        rest = pattern.removeprefix("*")
        begin = "(?:" if rest == pattern else "(?:.*"
        expressions.append(begin + "[^.]*".join(map(re.escape, rest.split("*"))) + ")")
    return re.compile("|".join(expressions) or r"(?!)")


def matches(pattern: str, path: str) -> bool:
    """Return whether the whole of ``path`` matches: a leading ``*`` stands for any characters, dots included, any other
    for those of one component.

    ``matches("layers.*.norm.weight", "layers.3.norm.weight")``, ``matches("*.bias", "a.b.bias")`` and
    ``matches("*norm.weight", "layers.3.mlp_norm.weight")`` are true.
    """
    return matches_any((pattern,), path)


def matches_any(patterns: Iterable[str], path: str) -> bool:
    """Return whether ``path`` matches one of ``patterns``."""
    return _compiled(tuple(patterns)).fullmatch(path) is not None


def matches_within(pattern: str, path: str) -> bool:
    """Return whether ``pattern`` matches the parameter at ``path`` or a module that contains it.

    ``matches_within("layers.3", "layers.3.mlp.up_proj.weight")`` is true.
    """
    parts = path.split(".")
    return any(matches(pattern, ".".join(parts[:count])) for count in range(1, len(parts) + 1))


def modules_at(module: nn.Module, patterns: Iterable[str]) -> dict[str, Any]:
    """Return the modules whose path a pattern matches, in order, without the placeholders of other stages."""
    wanted = tuple(patterns)
    return {
        path: part
        for path, part in module.named_modules()
        if matches_any(wanted, path) and not isinstance(part, nn.Identity)
    }


def style_of(plan: ParallelPlan, path: str) -> TensorStyle | None:
    """Return what tensor parallelism makes of the module at ``path``: the first entry of ``plan.tensor`` counts."""
    return next((style for pattern, style in plan.tensor.items() if matches(pattern, path)), None)


def styled(plan: ParallelPlan, *styles: TensorStyle) -> tuple[str, ...]:
    """Return the patterns of ``plan.tensor`` with one of ``styles``."""
    return tuple(pattern for pattern, style in plan.tensor.items() if style in styles)
