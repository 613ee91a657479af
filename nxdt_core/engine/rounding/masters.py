"""Masters that are rounded stochastically where they are computed with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from nxdt_core.distributed.placement import local_of
from nxdt_core.engine.rounding.kernels import BlockKernel, Numbers, apart, backend_on
from nxdt_core.engine.rounding.policy import StochasticRounding
from nxdt_core.models.random.rounding import noise, rounded
from nxdt_core.protocols.optimizer import ParameterShard

__all__ = ["rounded_weights"]


@contextmanager
def rounded_weights(
    parameters: Iterable[tuple[nn.Parameter, str, ParameterShard]], rounding: StochasticRounding | None, step: int
) -> Iterator[None]:
    """Round float32 shards to values of bfloat16 within the block, so that the cast when they are gathered is exact.

    However often a layer is gathered in a step, its copy is the same. The masters are kept too: 4 bytes per element
    of this rank's shards.

    Args:
        parameters: with the global name and the place of this rank's elements in the whole.
        rounding: None does nothing.
        step: number of the step in the run.
    """
    kept: list[tuple[nn.Parameter, torch.Tensor]] = []
    if rounding is not None:
        kept = _round(list(parameters), rounding, step)
    try:
        yield
    finally:
        if kept:  # read again: FSDP2 may have moved a shard that it had to pad
            torch._foreach_copy_([local_of(parameter).detach() for parameter, _ in kept], [copy for _, copy in kept])


def _round(
    parameters: list[tuple[nn.Parameter, str, ParameterShard]], rounding: StochasticRounding, step: int
) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Round shards in place, and return what they were."""
    shards = [local_of(parameter).detach() for parameter, _, _ in parameters]
    if not shards:
        return []
    device = shards[0].device
    backend = backend_on(device)
    kernel = BlockKernel(_keep_and_round, backend=backend)
    keys = apart(rounding.keys(step, [name for _, name, _ in parameters], device), backend)
    kept = []
    for (parameter, _, place), shard, key in zip(parameters, shards, keys, strict=True):
        copy = torch.empty_like(shard)
        kernel(place, (shard, copy), key)
        kept.append((parameter, copy))
    return kept


def _keep_and_round(shard: torch.Tensor, kept: torch.Tensor, numbers: Numbers, key: torch.Tensor) -> None:
    kept.copy_(shard)
    shard.copy_(rounded(shard, noise(numbers.of(shard), key)))
