"""Modules of a pipeline stage that a plan names by patterns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from nxdt_core.models.patterns import matches, matches_any
from nxdt_core.protocols.plan import ParallelPlan, TensorStyle


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
