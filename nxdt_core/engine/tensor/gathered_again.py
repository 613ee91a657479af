"""Inputs of tensor blocks that are kept as this rank's part of the sequence, and gathered again in backward.

(Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.) One gather serves all matrices of a block. It begins as soon
as the gradient of the block's last product is known, so that it overlaps with the backward of the rest of the block.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from nxdt_core.distributed.collectives import PendingGather, gather_along
from nxdt_core.engine.dropped import Dropped, dropping_in

__all__ = ["entering_block", "gather_dropped", "gathers_ahead"]


def gather_dropped(
    block: nn.Module, hidden: torch.Tensor, dtype: torch.dtype, dim: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return all ranks' ``hidden``, the input of ``block``, concatenated along ``dim`` as :func:`gather_along` does, in
    ``dtype``; backward keeps only ``hidden`` in it."""
    part = hidden.to(dtype)
    if torch.compiler.is_compiling():  # the graph contains the gather twice
        again: torch.Tensor = checkpoint(gather_along, part, dim, group, use_reentrant=False)
        return again
    whole, dropped = gather_along(part, dim, group), dropping_in(block)
    if dropped is not None:
        source = dropped.recipe(hidden)
        if source is not None:
            source.use()
        recipe = _GatheredAgain(part.detach() if source is None else source, dtype, dim, group)
        dropped.add(whole, recipe)
        dropped.block = weakref.ref(recipe)
    return whole


def gathers_ahead(part: nn.Module, partial: torch.Tensor) -> None:
    """Let the input of the block that ``part`` ends be gathered when the gradient of ``partial``, the block's last
    product, is known."""
    dropped = dropping_in(part)
    if dropped is not None and dropped.block is not None and partial.requires_grad:
        partial.register_hook(functools.partial(_begin, dropped.block))  # type: ignore[no-untyped-call]


@functools.cache
def entering_block(kind: Any) -> Any:
    """Return the class ``kind`` of a tensor block with a forward that applies its attribute ``entry`` to what it gets.

    Within the forward, and not in a hook in front of it: a block that is recomputed then keeps its part of the
    sequence, too.
    """

    class Entering(kind):  # type: ignore[misc]
        entry: Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]
        enters = True

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            dropped = dropping_in(self)
            if dropped is None:
                return super().forward(*self.entry(self, args), **kwargs)
            around, dropped.block = dropped.block, None
            output = super().forward(*self.entry(self, args), **kwargs)
            dropped.block = around
            return output

    Entering.__name__, Entering.__qualname__ = kind.__name__, kind.__qualname__
    return Entering


class _GatheredAgain(Dropped):
    def __init__(self, source: torch.Tensor | Dropped, dtype: torch.dtype, dim: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._source, self._dtype, self._dim, self._group = source, dtype, dim, group
        self._pending: PendingGather | None = None

    def begin(self) -> None:
        """Start the gather, if something will ask for the tensor."""
        if self._pending is None and self.wanted:
            with torch.no_grad():
                part = self._source.take() if isinstance(self._source, Dropped) else self._source
                self._pending = PendingGather(part.to(self._dtype), self._dim, self._group)

    def make(self) -> torch.Tensor:
        self.begin()
        assert self._pending is not None, "asked for by more than keep it"
        pending, self._pending = self._pending, None
        return pending.wait()


def _begin(block: weakref.ref[Dropped], _: torch.Tensor) -> None:
    recipe = block()
    if isinstance(recipe, _GatheredAgain):
        recipe.begin()
