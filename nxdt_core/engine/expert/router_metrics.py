"""What routers did in a training step, over the whole global batch: load of the experts, drops, entropy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nxdt_core.models.patterns import matches_any
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["RouterMetrics", "routers_of"]

_STATISTICS = 3
"""Columns behind those of the experts: dropped assignments, entropies, tokens."""


def routers_of(whole: nn.Module, plan: ParallelPlan) -> dict[str, int]:
    """Return the number of experts of each router that keeps statistics, by path, in the order of the whole model."""
    return {
        path: int(part.experts)
        for path, part in whole.named_modules()
        if matches_any(plan.experts.routers, path) and hasattr(part, "statistics")
    }


class RouterMetrics:
    """Adds up the statistics of this process's routers, and computes metrics from the sums of all processes.

    Statistics are read when a stage's forward ends, which recomputation does not repeat. Nothing leaves the device.

    Args:
        routers: of the whole model, as :func:`routers_of` gives them.
        stages: the modules of this process.
        device: of these modules and of the sums.
        dtype: of the sums.
    """

    def __init__(
        self, routers: Mapping[str, int], stages: Sequence[nn.Module], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._rows = {path: row for row, path in enumerate(routers)}
        self._stages = stages if routers else ()
        experts = torch.tensor(list(routers.values()), dtype=torch.int64).unsqueeze(1)  # [routers, 1]
        widest = max(routers.values(), default=0)
        self._no_expert = (torch.arange(widest) >= experts).to(device)
        self._experts = experts.to(device=device, dtype=dtype)
        self.sums = torch.zeros(len(routers), widest + _STATISTICS, device=device, dtype=dtype)
        """[routers, columns]; they add up over data, context and pipeline parallel ranks, tensor parallel ones have
        copies."""

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count, from zero on, what runs forward within the block."""
        self.sums.zero_()
        hooks = [stage.register_forward_hook(self._count) for stage in self._stages]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def metrics(self, sums: torch.Tensor) -> dict[str, torch.Tensor]:
        """Scalars from the :attr:`sums` of all processes, added up; none where the model has no routers.

        ``expert_load_max`` and ``expert_load_min``: assignments of the busiest and of the idlest expert of all layers,
        in multiples of an equal share; ``expert_load_layer_max``: the mean over layers of each one's busiest.
        ``dropped_tokens``: share of the assignments that exceeded the capacity. ``router_entropy``: mean over layers
        and tokens in nats, ``ln(experts)`` where all experts are equally likely.
        """
        if not self._rows:
            return {}
        assigned, dropped, entropy, tokens = torch.split(sums, [sums.shape[1] - _STATISTICS, 1, 1, 1], dim=1)
        total = assigned.sum(1, keepdim=True)
        loads = assigned * (self._experts / total)
        busiest = loads.amax(1)
        return {
            "expert_load_max": busiest.max(),
            "expert_load_layer_max": busiest.mean(),
            "expert_load_min": loads.masked_fill(self._no_expert, math.inf).min(),
            "dropped_tokens": dropped.sum() / total.sum(),
            "router_entropy": (entropy / tokens).mean(),
        }

    @torch.no_grad()
    def _count(self, stage: nn.Module, arguments: Any, output: Any) -> None:
        for path, part in stage.named_modules():
            row = self._rows.get(path)
            if row is None:
                continue
            said = part.statistics
            missing = self.sums.shape[1] - _STATISTICS - len(said.assigned)
            metrics = torch.stack((said.dropped, said.entropy, said.tokens))
            self.sums[row] += torch.cat((functional.pad(said.assigned, (0, missing)), metrics))
