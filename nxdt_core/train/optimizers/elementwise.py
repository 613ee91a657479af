"""Optimizers that work element by element, so that they may see shards: those of torch, and Lion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.adamw import adamw as adamw_update

from nxdt_core.distributed.buckets import buckets
from nxdt_core.distributed.devices import HOST, profile_of
from nxdt_core.engine.optim.state import EagerOptimizer, eager
from nxdt_core.protocols.optimizer import ParameterGroup, as_torch
from nxdt_core.train.optimizers.config import AdamConfig, AdamWConfig, LionConfig

BUCKET_ELEMENTS = 2**25
"""Weights and gradients that exist in float32 at a time: 256 MiB of both."""


def adamw(groups: list[ParameterGroup], config: AdamWConfig) -> torch.optim.Optimizer:
    """Torch's AdamW; learning rate and weight decay are those of each group."""
    return eager(torch.optim.AdamW)(as_torch(groups), **_adam(groups, config))


def adam(groups: list[ParameterGroup], config: AdamConfig) -> torch.optim.Optimizer:
    """Return torch's Adam over ``groups``."""
    return eager(torch.optim.Adam)(as_torch(groups), **_adam(groups, config))


def _of_torch(kind: Any, keys: Sequence[str], groups: list[ParameterGroup], config: Any) -> torch.optim.Optimizer:
    """Return an optimizer of torch over groups; ``keys`` of its section have the names that torch gives."""
    return eager(kind)(as_torch(groups), **{key: getattr(config, key) for key in keys})


sgd = partial(_of_torch, torch.optim.SGD, ("momentum", "dampening", "nesterov"))
adadelta = partial(_of_torch, torch.optim.Adadelta, ("rho", "eps"))
adamax = partial(_of_torch, torch.optim.Adamax, ("betas", "eps"))
adagrad = partial(_of_torch, torch.optim.Adagrad, ("lr_decay", "initial_accumulator_value", "eps"))
rmsprop = partial(_of_torch, torch.optim.RMSprop, ("alpha", "eps", "momentum", "centered"))
rprop = partial(_of_torch, torch.optim.Rprop, ("etas", "step_sizes"))


def _adam(groups: list[ParameterGroup], config: AdamConfig) -> dict[str, Any]:
    """Return the settings of Adam; kernels are fused where the parameters' device has such, unless the section says."""
    fused = config.fused
    if fused is None:
        first = next(parameter for group in groups for parameter in group["params"])
        fused = profile_of(first.device).fused_optimizers
    return {"betas": config.betas, "eps": config.eps, "fused": fused, "capturable": config.capturable}


def adamw_fp32_state(groups: list[ParameterGroup], config: AdamWConfig) -> torch.optim.Optimizer:
    """Torch's AdamW where no parameter has less than float32, which is the same; else :class:`AdamWFloat32State`."""
    if all(p.dtype.itemsize >= 4 for group in groups for p in group["params"]):
        return adamw(groups, config)
    return AdamWFloat32State(groups, config)


class AdamWFloat32State(EagerOptimizer):
    """Running means in float32, so that small squares of gradients neither vanish nor stop changing."""

    def __init__(self, groups: list[ParameterGroup], config: AdamWConfig) -> None:
        super().__init__(as_torch(groups), _adam(groups, config))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        for group in self.param_groups:
            updated = [p for p in group["params"] if p.grad is not None]
            for bucket in buckets(updated, torch.Tensor.numel, BUCKET_ELEMENTS):
                self._update(bucket, group)

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Update one bucket, in a separate function so that its float32 copies are freed before the next bucket."""
        states: list[dict[str, torch.Tensor]] = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                on_device = group["fused"] or group["capturable"]
                state["step"] = torch.zeros((), device=parameter.device if on_device else HOST)
                state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
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


class Lion(EagerOptimizer):
    """One running mean a weight; every weight moves by the learning rate."""

    def __init__(self, groups: list[ParameterGroup], config: LionConfig) -> None:
        super().__init__(as_torch(groups), {"betas": config.betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            grads = [p.grad for p in weights]
            for p in weights:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            means = [self.state[p]["exp_avg"] for p in weights]
            in_update, in_mean = group["betas"]
            updates = torch._foreach_lerp(means, grads, 1 - in_update)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
            torch._foreach_lerp_(means, grads, 1 - in_mean)
