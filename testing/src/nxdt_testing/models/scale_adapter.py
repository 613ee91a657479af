"""An adapter for tests of engines: freezes the model and trains one scale of its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nxdt_core.models.norm import RMSNorm
from nxdt_core.protocols.initialisation import InitRule
from nxdt_core.protocols.parallel.engine import ParallelEngine
from nxdt_core.protocols.parallel.model import ParallelModel
from nxdt_core.protocols.parallel.ranks import RankAgreement
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["ADDED", "ScaleAdapter"]

ADDED = "norm.scale"
"""Name of the parameter that it adds."""


class _Scaled(RMSNorm):
    """A norm that is followed by its own scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [batch, seq, hidden] to the same shape."""
        return super().forward(hidden) * self.scale


class ScaleAdapter:
    """A :class:`nxdt_core.protocols.adapter.Adapter` for models with a module ``norm``."""

    saves_base = True

    def __init__(self, config: Any = None) -> None:
        del config  # it has no options

    def apply(self, module: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        """Freeze ``module`` and add the scale."""
        norm: Any = module.norm
        with torch.device(norm.weight.device):
            scaled = _Scaled(norm.weight.numel(), norm.eps).to(norm.weight.dtype)
        module.norm = scaled
        module.requires_grad_(False)
        scaled.scale.requires_grad_(True)
        return replace(plan, norms=(*plan.norms, ADDED))

    def init_rules(self) -> Sequence[InitRule]:
        """Initialise the scale to one."""
        return (InitRule(pattern=ADDED, distribution="constant", mean=1.0),)

    def begin(self, model: ParallelModel, config: Any, engine: ParallelEngine) -> None:
        """Set nothing."""

    def check_resume(self, saved: Mapping[str, Any], where: str) -> None:
        """Accept every checkpoint."""

    def finish(self, checkpoint: str | None, config: Any, ranks: RankAgreement) -> None:
        """Leave nothing."""
