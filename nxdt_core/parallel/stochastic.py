"""Stochastic rounding of weights: of updates where there are no masters, else of the copies of masters.

Which way an element is rounded is a function of (seed, step, global parameter name, global element) alone: the same on
every replica and in every layout, and there is no state to save.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from nxdt_core.nn.rounding import round_into
from nxdt_core.nn.streams import Stream
from nxdt_core.parallel.placement import local_of
from nxdt_core.protocols.optimizer import ParameterShard
from nxdt_core.protocols.precision import PrecisionPolicy

__all__ = [
    "BUCKET_ELEMENTS",
    "StochasticRounding",
    "StochasticUpdates",
    "in_buckets",
    "masters_rounded",
    "rounded_weights",
    "updates_rounded",
]

BUCKET_ELEMENTS = 2**25
"""Elements of whole parameters whose weights and gradients exist in float32 at a time: 256 MiB of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StochasticRounding:
    """How a run rounds."""

    seed: int
    state: Literal["float32", "bfloat16"] = "float32"
    """What the optimizer's state lies in between steps."""

    def stream(self, step: int, name: str) -> Stream:
        """The random numbers of one tensor in one step."""
        return Stream.of(self.seed, f"rounding\0{step}\0{name}")


def updates_rounded(policy: PrecisionPolicy, seed: int) -> StochasticRounding | None:
    """How a policy rounds what the optimizer makes of the weights; None where it has masters, or rounds to nearest."""
    if not policy.stochastic_rounding or policy.master_weights:
        return None
    return StochasticRounding(seed=seed, state="bfloat16" if policy.optimizer_state == "bfloat16" else "float32")


def masters_rounded(policy: PrecisionPolicy, seed: int) -> StochasticRounding | None:
    """How a policy rounds masters to what is computed with; None where it rounds to nearest, or has none."""
    return StochasticRounding(seed=seed) if policy.stochastic_rounding and policy.master_weights else None


@contextmanager
def rounded_weights(
    parameters: Iterable[tuple[nn.Parameter, str, ParameterShard]], rounding: StochasticRounding | None, step: int
) -> Iterator[None]:
    """Within the block float32 shards have values of bfloat16, which whoever gathers them casts without a loss.

    However often a layer is gathered in a step, its copy is the same. The masters are kept beside: 4 bytes an element
    of this rank's shards.

    Args:
        parameters: with the global name and the place of this rank's elements in the whole.
        rounding: None does nothing.
        step: number of the step in the run.
    """
    kept: list[tuple[nn.Parameter, torch.Tensor]] = []
    if rounding is not None:
        for parameter, name, place in parameters:
            shard = local_of(parameter).detach()
            kept.append((parameter, shard.clone()))
            _round(place, rounding.stream(step, name), shard, shard)
    try:
        yield
    finally:
        for parameter, master in kept:
            local_of(parameter).detach().copy_(master)  # FSDP2 may have moved a shard that it had to pad


class StochasticUpdates:
    """Lets an optimizer work on float32 stand-ins of the weights, some parameters at a time.

    The optimizer is called once a bucket: it leaves parameters without a gradient alone. Buckets are made of the sizes
    of whole parameters, so that ranks that share them have the same ones.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        places: Mapping[str, ParameterShard],
        rounding: StochasticRounding,
    ) -> None:
        """``weights``: this rank's shards by global name; ``places``: where each lies in its whole."""
        self._weights = weights
        self._places = places
        self._rounding = rounding
        self.stand_ins = {name: nn.Parameter(_without_memory(weight)) for name, weight in weights.items()}
        """What the optimizer is to be built over; they have memory while it works on them."""

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Update all weights that have a gradient; ``step`` is the number of this update in the run."""
        sizes = {name: math.prod(self._places[name].shape) for name, w in self._weights.items() if w.grad is not None}
        for bucket in in_buckets(sizes):
            self._borrow(optimizer, bucket)
            optimizer.step()
            for name in bucket:
                self._give_back(optimizer, name, step)

    def _borrow(self, optimizer: torch.optim.Optimizer, names: list[str]) -> None:
        for name in names:
            weight, stand_in = self._weights[name], self.stand_ins[name]
            assert weight.grad is not None
            stand_in.data, stand_in.grad = weight.detach().float(), weight.grad.float()
            state = optimizer.state[stand_in]
            for leaf in self._narrow(state, torch.bfloat16, stand_in):
                state[leaf] = state[leaf].float()

    def _give_back(self, optimizer: torch.optim.Optimizer, name: str, step: int) -> None:
        weight, stand_in = self._weights[name], self.stand_ins[name]
        state = optimizer.state[stand_in]
        for leaf in self._narrow(state, torch.float32, stand_in):
            rounded = torch.zeros_like(state[leaf], dtype=torch.bfloat16)
            _round(self._places[name], self._rounding.stream(step, f"{name}/{leaf}"), rounded, state[leaf])
            state[leaf] = rounded
        _round(self._places[name], self._rounding.stream(step, name), weight.detach(), stand_in.data)
        stand_in.data, stand_in.grad = _without_memory(weight), None

    def _narrow(self, state: Mapping[str, object], dtype: torch.dtype, like: torch.Tensor) -> list[str]:
        """Names of the state that is kept in bfloat16, as far as it has ``dtype`` now."""
        if self._rounding.state == "float32":
            return []
        return [
            leaf
            for leaf, value in state.items()
            if isinstance(value, torch.Tensor) and value.dtype == dtype and value.dim() and value.shape == like.shape
        ]


def in_buckets(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names by bucket, in their order; ``sizes`` are elements of whole parameters."""
    bucket: list[str] = []
    filled = 0
    for name, elements in sizes.items():
        if bucket and filled + elements > BUCKET_ELEMENTS:
            yield bucket
            bucket, filled = [], 0
        bucket.append(name)
        filled += elements
    if bucket:
        yield bucket


def _round(place: ParameterShard, stream: Stream, target: torch.Tensor, values: torch.Tensor) -> None:
    """Without the zeros that fill up padded parameters."""
    round_into(place.real(target), place.real(values), stream, shape=place.shape, offsets=place.box.offsets)


def _without_memory(weight: torch.Tensor) -> torch.Tensor:
    """A float32 tensor of the weight's shape with the memory of one number."""
    return torch.zeros((), dtype=torch.float32, device=weight.device).expand(weight.shape)
