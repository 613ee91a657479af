"""Activation recomputation: what a module computes in forward is dropped and computed again when backward needs it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

from nxdt_core.errors import UnknownRecomputeName
from nxdt_core.nn.dropout import Dropout
from nxdt_core.nn.masks import same_draws
from nxdt_core.nn.patterns import matches_any
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["apply_recompute"]


def apply_recompute(
    module: nn.Module,
    plan: ParallelPlan,
    *,
    granularity: Literal["full", "selective"] | None,
    names: Sequence[str] = (),
) -> None:
    """Let parts of ``module`` keep only their inputs for backward.

    In place, without a change to the names of modules and parameters. Recomputation may nest. Random numbers are drawn
    as they were the first time, so that gradients are bit-equal.

    Args:
        module: one pipeline stage, sharded already; patterns that match nothing here belong to other stages.
        plan: says what a layer is and which modules each name means.
        granularity: ``full`` recomputes whole layers, ``selective`` what ``names`` say, None nothing.
        names: keys of ``plan.recompute``; read under ``selective`` alone.

    Raises:
        UnknownRecomputeName: the plan has no such name.
    """
    if granularity is None:
        return
    unknown = [name for name in names if name not in plan.recompute]
    if granularity == "selective" and unknown:
        raise UnknownRecomputeName(names=unknown, known=sorted(plan.recompute))
    layers = (plan.recompute_layer,)
    named = [pattern for name in names for pattern in plan.recompute.get(name, ())]
    patterns = layers if granularity == "full" else named
    for part in _matching(module, patterns):
        # Wrapped is the forward alone. Hooks then run once, outside: those of fully_shard, whose weights are gathered
        # again by the time backward asks, and those that enter a tensor block. (The hooks of
        # torch.distributed._composable.checkpoint call the module, and so other hooks, twice on the same input.)
        part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False)
        if any(isinstance(inner, Dropout) for inner in part.modules()):
            part.forward = functools.partial(part.forward, context_fn=_as_first)


def _as_first() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the first computation and of the second, which may run while another micro-batch does."""
    return nullcontext(), same_draws()


def _matching(module: nn.Module, patterns: Sequence[str]) -> Iterator[nn.Module]:
    """Each module that a pattern names, once; placeholders of other stages are left out."""
    for path, part in module.named_modules():
        if matches_any(patterns, path) and not isinstance(part, nn.Identity):
            yield part
