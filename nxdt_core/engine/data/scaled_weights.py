"""Scaling factors of weights that FSDP2 gathers in one byte per element: those of whole weights, once per pass.

The largest elements of all shards are found over the ranks in one all-reduce, before the first gather needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from nxdt_core.distributed.placement import local_of
from nxdt_core.engine.data.gathers import WeightGather

__all__ = ["ScaledWeights"]


class ScaledWeights:
    """The weights of a rank's stages that travel in one byte per element while a pass runs."""

    def __init__(
        self,
        gathers: Sequence[WeightGather],
        parameters: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup | None,
    ) -> None:
        """
        Args:
            gathers: of all stages, in the order that all ranks share.
            parameters: this rank's shards by name.
            group: the ranks that have the other shards; None where this one has all of them.
        """
        self._gathers = [gather for gather in gathers if gather.scaled] if group is not None else []
        self._forms = self._gathers[0].forms if self._gathers else None
        self._weights = {name: parameters[name] for gather in self._gathers for name in gather.scaled}
        self._group = group

    @contextmanager
    def during(self) -> Iterator[None]:
        """Use the scales of the weights as they are now within the block. Collective."""
        self.update()
        try:
            yield
        finally:
            self.forget()

    @torch.no_grad()
    def update(self) -> None:
        """Find the scales of the weights as they are now. Collective."""
        if self._forms is None or self._forms.cast is None:
            return
        shards = [local_of(weight).detach() for weight in self._weights.values()]
        held = [shard if shard.numel() else shard.new_zeros(1) for shard in shards]
        # Rounding keeps the order of values: the largest rounded value is that of the largest.
        maxima = torch.stack(torch._foreach_norm(held, torch.inf)).to(self._forms.dtype).float()
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self._group)
        scales = dict(zip(self._weights, self._forms.cast.scales(maxima).unbind(), strict=True))
        for gather in self._gathers:
            gather.set_scales({name: scales[name] for name in gather.scaled})

    def forget(self) -> None:
        """Let all weights travel in two bytes again: they may change."""
        for gather in self._gathers:
            gather.set_scales({})
