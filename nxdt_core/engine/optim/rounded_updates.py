"""Updates of weights that have no masters: computed in float32 and rounded stochastically into bfloat16."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from nxdt_core.distributed.buckets import buckets
from nxdt_core.engine.optim.rounding import Backend, BlockKernel, Numbers, StochasticRounding, separate_rows
from nxdt_core.models.random.positions import noises, rounded
from nxdt_core.protocols.optimizer import ParameterShard

BUCKET_ELEMENTS = 2**25
"""Elements of whole parameters whose weights and gradients exist in float32 at a time: 256 MiB of both."""


class StochasticUpdates:
    """Updates weights that are rounded by an optimizer that sees float32.

    The optimizer works on float32 :func:`stand_ins` of the weights, some parameters at a time: it is called once per
    bucket, and leaves parameters without a gradient alone. Buckets are made of the sizes of whole parameters, so that
    ranks that share them have the same ones.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        weights: Mapping[str, torch.Tensor],
        places: Mapping[str, ParameterShard],
        trained: Mapping[str, nn.Parameter],
        rounding: StochasticRounding,
        *,
        backend: Backend,
    ) -> None:
        """See :class:`nxdt_core.engine.optim.adam.AdamUpdates`; ``trained`` are stand-ins."""
        self._optimizer = optimizer
        self._weights = weights
        self._places = places
        self._stand_ins = trained
        self._rounding = rounding
        self._backend: Backend = backend
        self._kernel = BlockKernel(round_into, backend=backend)

    def apply(self, step: int) -> None:
        """Update all weights that have a gradient; ``step`` is the number of this update in the run."""
        sizes = {name: math.prod(self._places[name].shape) for name, w in self._weights.items() if w.grad is not None}
        for bucket in buckets(sizes, sizes.__getitem__, BUCKET_ELEMENTS):
            self._fill_stand_ins(bucket)
            self._optimizer.step()
            self._round_stand_ins(bucket, step)

    def _fill_stand_ins(self, names: list[str]) -> None:
        for name in names:
            weight, stand_in = self._weights[name], self._stand_ins[name]
            assert weight.grad is not None
            stand_in.data, stand_in.grad = weight.detach().float(), weight.grad.float()
            state = self._optimizer.state[stand_in]
            for leaf in self._narrow(name, torch.bfloat16):
                state[leaf] = state[leaf].float()

    def _round_stand_ins(self, names: list[str], step: int) -> None:
        rounded = []
        for name in names:
            state = self._optimizer.state[self._stand_ins[name]]
            for leaf in self._narrow(name, torch.float32):
                target = torch.zeros_like(state[leaf], dtype=torch.bfloat16)
                rounded.append((name, f"{name}/{leaf}", target, state[leaf]))
                state[leaf] = target
            rounded.append((name, name, self._weights[name].detach(), self._stand_ins[name].data))
        keys = self._rounding.keys(step, [key for _, key, _, _ in rounded], rounded[0][2].device)
        for (name, _, target, values), key in zip(rounded, separate_rows(keys, self._backend), strict=True):
            self._kernel(self._places[name], (target, values), key)
        for name in names:
            stand_in = self._stand_ins[name]
            stand_in.data, stand_in.grad = _without_memory(self._weights[name]), None

    def _narrow(self, name: str, dtype: torch.dtype) -> list[str]:
        """Return the names of the state that is kept in bfloat16 and has ``dtype`` now."""
        if self._rounding.state == "float32":
            return []
        stand_in = self._stand_ins[name]
        return [
            leaf
            for leaf, value in self._optimizer.state[stand_in].items()
            if isinstance(value, torch.Tensor)
            and value.dtype == dtype
            and value.dim()
            and value.shape == stand_in.shape
        ]


def stand_ins(weights: Mapping[str, torch.Tensor]) -> dict[str, nn.Parameter]:
    """Return float32 parameters to build an optimizer over, which have memory while it works on them."""
    return {name: nn.Parameter(_without_memory(weight)) for name, weight in weights.items()}


def round_into(target: torch.Tensor, values: torch.Tensor, numbers: Numbers, key: torch.Tensor) -> None:
    """Round float32 ``values`` into ``target``; a function for :class:`BlockKernel`."""
    target.copy_(rounded(values, *noises(numbers.hashed(values, key), 1)))


def _without_memory(weight: torch.Tensor) -> torch.Tensor:
    """Return a float32 tensor of the weight's shape with the memory of one number."""
    return torch.zeros((), dtype=torch.float32, device=weight.device).expand(weight.shape)
