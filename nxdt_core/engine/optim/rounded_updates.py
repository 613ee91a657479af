"""Updates of weights that have no masters: computed in float32 and rounded stochastically into bfloat16.

For Adam and AdamW one kernel reads and writes each element once. The state is that of torch's, under the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from nxdt_core.buckets import buckets
from nxdt_core.distributed.devices import profile_of
from nxdt_core.eager_optimizers import eager
from nxdt_core.engine.optim.rounding import Backend, BlockKernel, Numbers, StochasticRounding, separate_rows
from nxdt_core.models.random.positions import KEY_WORDS, noise, rounded
from nxdt_core.protocols.optimizer import ParameterShard

BUCKET_ELEMENTS = 2**25
"""Elements of whole parameters whose weights and gradients exist in float32 at a time: 256 MiB of both."""
_LEAVES = ("", "/exp_avg", "/exp_avg_sq")
"""What is rounded of a parameter: its weights, then the state where that is bfloat16."""
_OTHER_UPDATES = ("amsgrad", "maximize", "differentiable")
"""Options of torch's that change the arithmetic; the configuration has none of them."""


class StochasticUpdates:
    """Updates weights that are rounded by an optimizer that sees float32.

    Torch's Adam and AdamW take :class:`AdamUpdates`. Any other optimizer works on float32 stand-ins of the weights,
    some parameters at a time: it is called once per bucket, and leaves parameters without a gradient alone. Buckets are
    made of the sizes of whole parameters, so that ranks that share them have the same ones.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        places: Mapping[str, ParameterShard],
        rounding: StochasticRounding,
        *,
        backend: Backend = "eager",
    ) -> None:
        """``weights``: this rank's shards by global name; ``places``: where each is in its whole; ``backend`` as for
        :class:`BlockKernel`."""
        self._weights = weights
        self._places = places
        self._rounding = rounding
        self._backend: Backend = backend
        self._kernel = BlockKernel(round_into, backend=backend)
        self._adam: AdamUpdates | None = None
        self.stand_ins = {name: nn.Parameter(_without_memory(weight)) for name, weight in weights.items()}
        """What the optimizer is to be built over; they have memory while it works on them."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Use the optimizer that was built over the stand-ins."""
        self._optimizer = optimizer
        if AdamUpdates.handles(optimizer):
            self._adam = AdamUpdates(
                optimizer, self._weights, self._places, self.stand_ins, self._rounding, backend=self._backend
            )

    def apply(self, step: int) -> None:
        """Update all weights that have a gradient; ``step`` is the number of this update in the run."""
        if self._adam is not None:
            self._adam.apply(step)
            return
        sizes = {name: math.prod(self._places[name].shape) for name, w in self._weights.items() if w.grad is not None}
        for bucket in buckets(sizes, sizes.__getitem__, BUCKET_ELEMENTS):
            self._fill_stand_ins(bucket)
            self._optimizer.step()
            self._round_stand_ins(bucket, step)

    def _fill_stand_ins(self, names: list[str]) -> None:
        for name in names:
            weight, stand_in = self._weights[name], self.stand_ins[name]
            assert weight.grad is not None
            stand_in.data, stand_in.grad = weight.detach().float(), weight.grad.float()
            state = self._optimizer.state[stand_in]
            for leaf in self._narrow(name, torch.bfloat16):
                state[leaf] = state[leaf].float()

    def _round_stand_ins(self, names: list[str], step: int) -> None:
        rounded = []
        for name in names:
            state = self._optimizer.state[self.stand_ins[name]]
            for leaf in self._narrow(name, torch.float32):
                target = torch.zeros_like(state[leaf], dtype=torch.bfloat16)
                rounded.append((name, f"{name}/{leaf}", target, state[leaf]))
                state[leaf] = target
            rounded.append((name, name, self._weights[name].detach(), self.stand_ins[name].data))
        keys = self._rounding.keys(step, [key for _, key, _, _ in rounded], rounded[0][2].device)
        for (name, _, target, values), key in zip(rounded, separate_rows(keys, self._backend), strict=True):
            self._kernel(self._places[name], (target, values), key)
        for name in names:
            stand_in = self.stand_ins[name]
            stand_in.data, stand_in.grad = _without_memory(self._weights[name]), None

    def _narrow(self, name: str, dtype: torch.dtype) -> list[str]:
        """Return the names of the state that is kept in bfloat16 and has ``dtype`` now."""
        if self._rounding.state == "float32":
            return []
        stand_in = self.stand_ins[name]
        return [
            leaf
            for leaf, value in self._optimizer.state[stand_in].items()
            if isinstance(value, torch.Tensor)
            and value.dtype == dtype
            and value.dim()
            and value.shape == stand_in.shape
        ]


def round_into(target: torch.Tensor, values: torch.Tensor, numbers: Numbers, key: torch.Tensor) -> None:
    """Round float32 ``values`` into ``target``; a function for :class:`BlockKernel`."""
    target.copy_(rounded(values, noise(numbers.of(values), key)))


def _without_memory(weight: torch.Tensor) -> torch.Tensor:
    """Return a float32 tensor of the weight's shape with the memory of one number."""
    return torch.zeros((), dtype=torch.float32, device=weight.device).expand(weight.shape)


class AdamUpdates:
    """The step of torch's ``Adam`` or ``AdamW`` in one kernel for each parameter, with the same arithmetic in float32.

    Every kernel reads weights, gradients and state and writes weights and state: 22 bytes for each element where
    weights and gradients are bfloat16 and the state is float32. What all parameters share (steps, rates, keys) takes
    some kernels over one number for each parameter.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        weights: Mapping[str, torch.Tensor],
        places: Mapping[str, ParameterShard],
        stand_ins: Mapping[str, torch.nn.Parameter],
        rounding: StochasticRounding,
        *,
        backend: Backend,
    ) -> None:
        """``weights``: this rank's shards by global name; ``stand_ins``: what the optimizer was built over, the keys of
        its state; ``backend`` as for :class:`BlockKernel`."""
        self._optimizer = optimizer
        self._backend: Backend = backend
        self._weights = weights
        self._places = places
        self._stand_ins = stand_ins
        self._rounding = rounding
        self._dtype: torch.dtype = getattr(torch, rounding.state)
        self._leaves = _LEAVES if rounding.state == "bfloat16" else _LEAVES[:1]
        self._kernels = {
            decoupled: BlockKernel(_decoupled if decoupled else _coupled, backend=backend)
            for decoupled in (True, False)
        }
        names = {stand_in: name for name, stand_in in stand_ins.items()}
        self._groups = {names[p]: group for group in optimizer.param_groups for p in group["params"]}

    @staticmethod
    def handles(optimizer: torch.optim.Optimizer) -> bool:
        """Return whether ``optimizer`` is torch's own Adam or AdamW, of which nothing is overridden."""
        kinds = (torch.optim.Adam, torch.optim.AdamW)
        return type(optimizer) in (*kinds, *map(eager, kinds)) and not any(
            group.get(option) for group in optimizer.param_groups for option in _OTHER_UPDATES
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
        keys = self._rounding.keys(step, [f"{name}{leaf}" for name in names for leaf in self._leaves], device)
        of_leaves = separate_rows(keys.view(len(names), len(self._leaves), KEY_WORDS), self._backend)
        shared = separate_rows(factors, self._backend)
        for name, state, key, factor in zip(names, states, of_leaves, shared, strict=True):
            weight = self._weights[name].detach()
            tensors = (weight, gradients[name], state["exp_avg"], state["exp_avg_sq"])
            kernel = self._kernels[self._groups[name]["decoupled_weight_decay"]]
            kernel(self._places[name], tensors, key, factor, rejected)
        _count([state["step"] for state in states], taken)

    def _handed(self, name: str) -> torch.Tensor | None:
        found: torch.Tensor | None = getattr(self._optimizer, name, None)
        return found

    def _state(self, name: str) -> dict[str, torch.Tensor]:
        """Return torch's state in the run's dtype; a loaded one may have another, or the step be on another device."""
        weight = self._weights[name]
        state: dict[str, torch.Tensor] = self._optimizer.state[self._stand_ins[name]]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight, dtype=self._dtype)
            state["exp_avg_sq"] = torch.zeros_like(weight, dtype=self._dtype)
        for leaf in ("exp_avg", "exp_avg_sq"):
            state[leaf] = state[leaf].to(self._dtype)
        return state

    def _factors(self, names: Sequence[str], steps: torch.Tensor) -> torch.Tensor:
        """Return the factors of each parameter's update, float32 [names, 9], computed in float64."""
        groups = [self._groups[name] for name in names]
        given = torch.tensor([_hyperparameters(group) for group in groups], dtype=torch.float64)
        lr, decay, beta1, beta2, eps, scale = given.to(steps.device, non_blocking=True).unbind(1)
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
    keys: torch.Tensor,
    factors: torch.Tensor,
    rejected: torch.Tensor | None,
) -> None:
    """Write the new ``weight``, ``mean`` and ``square``, all flat; see :meth:`AdamUpdates._factors`."""
    old = (value, mean.float(), square.float())
    new_mean = (grad - old[1]).mul_(factors[0]).add_(old[1])
    new_square = (old[2] * factors[1]).add_((grad * grad).mul_(factors[2]))
    change = (new_mean / _root(new_square).mul_(factors[5]).add_(factors[6])).mul_(factors[7])
    new = (decayed - change, new_mean, new_square)
    for leaf, (target, before, after) in enumerate(zip((weight, mean, square), old, new, strict=True)):
        written = after
        if target.dtype == torch.bfloat16:
            written = rounded(after, noise(numbers.of(target), keys[leaf]))
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
