"""How fresh weights are drawn: rules by parameter name, so that any shard of any layout can draw its own.

A fresh weight is a function of (seed, global parameter name, global element index) only; see
:mod:`nxdt_core.models.random.init` for the generator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["InitRule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InitRule:
    """Distribution of the parameters whose path matches ``pattern``; the first match of a list wins."""

    pattern: str
    """Path pattern as in :class:`nxdt_core.protocols.plan.ParallelPlan`; ``*`` alone matches all. One that matches no
    parameter is an error, except ``*.bias``."""
    distribution: Literal["normal", "truncated_normal", "uniform", "constant"]
    mean: float = 0.0
    std: float = 0.02
    """Standard deviation before truncation; half the width for ``uniform``; unused for ``constant``."""
    truncate_at: float = 3.0
    """Cut of ``truncated_normal``, in standard deviations on each side."""
