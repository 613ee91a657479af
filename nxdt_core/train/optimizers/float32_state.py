"""AdamW with float32 state over parameters of any dtype: each update is computed in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.adamw import adamw as adamw_update

from nxdt_core.distributed.devices import HOST
from nxdt_core.protocols.optimizer import ParameterGroup, as_torch
from nxdt_core.train.optimizers.config import AdamWConfig
from nxdt_core.train.optimizers.stock import adamw, fused_kernels

__all__ = ["BUCKET_ELEMENTS", "AdamWFloat32State", "adamw_fp32_state"]

BUCKET_ELEMENTS = 2**25
"""Weights and gradients that exist in float32 at a time: 256 MiB of both."""


def adamw_fp32_state(groups: list[ParameterGroup], config: AdamWConfig) -> torch.optim.Optimizer:
    """Torch's AdamW where no parameter has less than float32, which is the same; else :class:`AdamWFloat32State`."""
    if all(p.dtype.itemsize >= 4 for group in groups for p in group["params"]):
        return adamw(groups, config)
    return AdamWFloat32State(groups, config)


class AdamWFloat32State(torch.optim.Optimizer):
    """Running means in float32, so that small squares of gradients neither vanish nor stop changing."""

    def __init__(self, groups: list[ParameterGroup], config: AdamWConfig) -> None:
        defaults = {
            "betas": config.betas,
            "eps": config.eps,
            "fused": fused_kernels(groups) if config.fused is None else config.fused,
            "capturable": config.capturable,
        }
        super().__init__(as_torch(groups), defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        for group in self.param_groups:
            for bucket in _buckets([p for p in group["params"] if p.grad is not None]):
                self._update(bucket, group)

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Update one bucket, in a separate function so that its float32 copies are freed before the next bucket."""
        states = [self._state_of(p, on_device=group["fused"] or group["capturable"]) for p in parameters]
        weights = [p.float() for p in parameters]
        beta1, beta2 = group["betas"]
        adamw_update(
            weights,
            [p.grad.float() for p in parameters if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            capturable=group["capturable"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        torch._foreach_copy_(parameters, weights)

    def _state_of(self, parameter: torch.Tensor, *, on_device: bool) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device if on_device else HOST)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        return state


def _buckets(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    for parameter in parameters:
        if bucket and sum(p.numel() for p in bucket) + parameter.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
