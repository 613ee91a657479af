"""Activation recomputation: what a module computes in forward is dropped and computed again when backward needs it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nxdt_core.errors.models import UnknownRecomputeName
from nxdt_core.nn.patterns import matches_any
from nxdt_core.nn.random.dropout_masks import same_draws
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["apply_recompute", "defined_forward", "forward_within"]


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
        kind: Any = type(part)
        part.__class__ = _recomputed(kind)


@functools.cache
def _recomputed(kind: Any) -> Any:
    """``kind`` with a forward that is recomputed.

    A class, and not another ``forward`` of each module: ``torch.compile`` would tell layers apart by the identity of
    those, and compile each for itself.
    """

    class Recomputed(kind):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # what masks of dropout depend on is an input of the graph
                return checkpoint(self.computed, *args, use_reentrant=False, **kwargs)
            return checkpoint(self.computed, *args, use_reentrant=False, context_fn=_as_first, **kwargs)

        def computed(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    Recomputed.__name__, Recomputed.__qualname__ = kind.__name__, kind.__qualname__
    return Recomputed


def forward_within(module: nn.Module) -> str:
    """Return the name of the method that computes what ``module`` gives: the one that is run twice where it is
    recomputed."""
    return "computed" if hasattr(type(module), "computed") else "forward"


def defined_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward that the author of ``module`` has written."""
    kind: Any = type(module)
    written = kind.__mro__[1] if forward_within(module) == "computed" else kind
    forward: Callable[..., Any] = written.forward
    return forward


def _as_first() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the first computation and of the second, which may run while another micro-batch does."""
    return nullcontext(), same_draws()


def _matching(module: nn.Module, patterns: Sequence[str]) -> Iterator[nn.Module]:
    """Each module that a pattern names, once; placeholders of other stages are left out."""
    for path, part in module.named_modules():
        if matches_any(patterns, path) and not isinstance(part, nn.Identity):
            yield part
