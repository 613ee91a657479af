"""The step of torch's Adam and AdamW in one kernel for each parameter, for weights of any precision.

Torch's fused kernels write clipped gradients back, and round only to the nearest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nxdt_core.distributed.devices import profile_of
from nxdt_core.engine.optim.eager import eager
from nxdt_core.engine.optim.rounding import Backend, BlockKernel, Numbers, StochasticRounding, by_vectors, separate_rows
from nxdt_core.models.random.positions import noises, rounded_number
from nxdt_core.protocols.optimizer import ParameterShard

_OTHER_UPDATES = ("amsgrad", "maximize", "differentiable")
"""Options of torch's that change the arithmetic; the configuration has none of them."""


class AdamUpdates:
    """The step of torch's ``Adam`` or ``AdamW`` in one kernel for each parameter, with the same arithmetic in float32.

    Every kernel reads weights, gradients and state and writes weights and state: 28 bytes for each element in float32,
    22 where weights and gradients are bfloat16, 14 where the state is bfloat16 too. What all parameters share (steps,
    rates, keys) takes some kernels over one number for each parameter.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        weights: Mapping[str, torch.Tensor],
        places: Mapping[str, ParameterShard],
        trained: Mapping[str, torch.nn.Parameter],
        rounding: StochasticRounding | None = None,
        *,
        backend: Backend,
    ) -> None:
        """Update the parameters of ``optimizer``.

        Args:
            optimizer: keeps state and hyperparameters; its ``step`` is not called.
            weights: this rank's shards by global name.
            places: where each is in its whole.
            trained: what the optimizer was built over, the keys of its state.
            rounding: of bfloat16; None rounds to the nearest, and keeps state in the dtype of the weights as torch's.
            backend: as for :class:`BlockKernel`.
        """
        self._optimizer = optimizer
        self._backend: Backend = backend
        self._weights = weights
        self._trained = trained
        self._rounding = rounding
        self._places = places
        self._dtype: torch.dtype | None = None if rounding is None else getattr(torch, rounding.state)
        self._kernels = {
            decoupled: BlockKernel(_decoupled if decoupled else _coupled, backend=backend)
            for decoupled in (True, False)
        }
        names = {parameter: name for name, parameter in trained.items()}
        self._groups = {names[p]: group for group in optimizer.param_groups for p in group["params"]}

    @staticmethod
    def handles(optimizer: torch.optim.Optimizer) -> bool:
        """Return whether ``optimizer`` is torch's own Adam or AdamW, of which nothing is overridden, below float64."""
        kinds = (torch.optim.Adam, torch.optim.AdamW)
        return type(optimizer) in (*kinds, *map(eager, kinds)) and not any(
            any(map(group.get, _OTHER_UPDATES)) or any(p.dtype == torch.float64 for p in group["params"])
            for group in optimizer.param_groups
        )

    @torch.no_grad()
    def apply(self, step: int) -> None:
        """Update all weights that have a gradient; ``step`` is the number of this update in the run.

        As under torch's fused kernels, weights and state stay as they are where a tensor ``found_inf`` of the optimizer
        is not 0, and gradients are divided by its tensor ``grad_scale``, if it has one.
        """
        gradients = {name: weight.grad for name, weight in self._weights.items() if weight.grad is not None}
        if not gradients:
            return
        names, device = list(gradients), next(iter(gradients.values())).device
        states = [self._state(name) for name in names]
        rejected = self._handed("found_inf")
        taken = 1.0 if rejected is None else 1.0 - rejected
        factors = self._factors(names, torch.stack([state["step"] for state in states]).double() + taken)
        keys: Sequence[torch.Tensor | None] = [None] * len(names)
        if self._rounding is not None:
            keys = separate_rows(self._rounding.keys(step, names, device), self._backend)
        shared = separate_rows(factors, self._backend)
        for name, state, key, factor in zip(names, states, keys, shared, strict=True):
            weight = self._weights[name].detach()
            tensors = (weight, gradients[name], state["exp_avg"], state["exp_avg_sq"])
            kernel = self._kernels[self._groups[name]["decoupled_weight_decay"]]
            kernel(self._places[name], tensors, key, factor, rejected)
        _count([state["step"] for state in states], taken)

    def _handed(self, name: str) -> torch.Tensor | None:
        handed: torch.Tensor | None = getattr(self._optimizer, name, None)
        return handed

    def _state(self, name: str) -> dict[str, torch.Tensor]:
        """Return torch's state in the run's dtype, on the device of the weight; a loaded one may be elsewhere."""
        weight = self._weights[name]
        dtype = self._dtype or weight.dtype
        state: dict[str, torch.Tensor] = self._optimizer.state[self._trained[name]]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(weight, dtype=dtype)
        state["step"] = state["step"].to(weight.device)
        for leaf in ("exp_avg", "exp_avg_sq"):
            state[leaf] = state[leaf].to(dtype)
        return state

    def _factors(self, names: Sequence[str], steps: torch.Tensor) -> torch.Tensor:
        """Return the factors of each parameter's update, float32 [names, 9], computed in float64."""
        groups = [self._groups[name] for name in names]
        hyperparameters = torch.tensor([_hyperparameters(group) for group in groups], dtype=torch.float64)
        lr, decay, beta1, beta2, eps, scale = hyperparameters.to(steps.device, non_blocking=True).unbind(1)
        rate = lr / (1 - beta1**steps)
        root = (1 - beta2**steps).rsqrt()
        decoupled = 1 - lr * decay
        divisor = self._handed("grad_scale")
        scale = scale if divisor is None else scale / divisor
        return torch.stack([1 - beta1, beta2, 1 - beta2, decay, decoupled, root, eps, rate, scale], dim=1).float()


def _hyperparameters(group: Mapping[str, Any]) -> tuple[float, ...]:
    """Numbers of a parameter group, and a scale of gradients that leaves them as they are."""
    return float(group["lr"]), float(group["weight_decay"]), *map(float, group["betas"]), float(group["eps"]), 1.0


def _count(steps: list[torch.Tensor], taken: float | torch.Tensor) -> None:
    """``alpha`` chooses the overload that takes a tensor: the other would wait for the device to read its number."""
    torch._foreach_add_(steps, torch.as_tensor(taken, dtype=torch.float32, device=steps[0].device), alpha=1.0)


def _decoupled(weight: torch.Tensor, grad: torch.Tensor, *rest: Any) -> None:
    """Update as AdamW: the decay is taken from the weight."""
    factors = rest[4]
    value = weight.float()
    _update(weight, value, value * factors[4], grad.float() * factors[8], *rest)


def _coupled(weight: torch.Tensor, grad: torch.Tensor, *rest: Any) -> None:
    """Update as Adam: the decay is a part of the gradient."""
    factors = rest[4]
    value = weight.float()
    _update(weight, value, value, grad.float() * factors[8] + value * factors[3], *rest)


def _update(
    weight: torch.Tensor,
    value: torch.Tensor,
    decayed: torch.Tensor,
    grad: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    numbers: Numbers,
    key: torch.Tensor | None,
    factors: torch.Tensor,
    rejected: torch.Tensor | None,
) -> None:
    """Write the new ``weight``, ``mean`` and ``square``, all flat; see :meth:`AdamUpdates._factors`."""
    by_vectors(weight)
    old = (value, mean.float(), square.float())
    new_mean = (grad - old[1]).mul_(factors[0]).add_(old[1])
    new_square = (old[2] * factors[1]).add_((grad * grad).mul_(factors[2]))
    change = (new_mean / _root(new_square).mul_(factors[5]).add_(factors[6])).mul_(factors[7])
    new = (decayed - change, new_mean, new_square)
    if key is not None:  # one hash for all three; a NaN of the state makes one of the weight
        bits = torch.where(new[0] == new[0], numbers.hashed(weight, key), 0)
        drawn = noises(bits, 3 if mean.dtype == torch.bfloat16 else 1)
    for number, (target, before, after) in enumerate(zip((weight, mean, square), old, new, strict=True)):
        written = after
        if key is not None and target.dtype == torch.bfloat16:
            written = rounded_number(after, drawn[number])
        if rejected is not None:
            written = torch.where(rejected != 0, before, written)
        target.copy_(written)


def _root(square: torch.Tensor) -> torch.Tensor:
    """Return square roots that are right to the last bit on a host, as those of compiled code.

    Torch's own are MKL's there, of which one in five is not. NumPy uses the processor's instruction.
    """
    if torch.compiler.is_compiling() or not profile_of(square.device).host:
        return square.sqrt()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(square.numpy()))
