"""Activation recomputation: what a module computes in forward is dropped and computed again when backward needs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nxdt_core.engine.discarded import cast_discarded, discard_in, discarded_in, discarded_output, wrap_forward
from nxdt_core.errors.models import UnknownRecomputeName
from nxdt_core.models.autocast import compute_dtype
from nxdt_core.models.host_values import HostValues
from nxdt_core.models.patterns import matches_any
from nxdt_core.models.step_border import at_border, step_of
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["apply_recompute", "discard_in_layers", "is_recomputed", "parts_of_recomputed"]


def apply_recompute(
    module: nn.Module,
    plan: ParallelPlan,
    *,
    granularity: Literal["full", "selective"] | None,
    names: Sequence[str] = (),
) -> None:
    """Let parts of ``module`` save only their inputs for backward.

    Of cheap ones in a layer, such as norms and activation functions, the result is dropped, too: what reads it gets it
    from a second computation.

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
        wrap_forward(part, _Recomputed.forward, inner="computed")
        part.discards_output = False  # type: ignore[assignment]
    if granularity == "selective":
        _discard_outputs(module, plan, patterns)


def discard_in_layers(module: nn.Module, plan: ParallelPlan) -> None:
    """Let the layers of ``module`` discard what their parts compute again, unless the layers are recomputed."""
    for layer in _matching(module, (plan.recompute_layer,)):
        if not (is_recomputed(layer) or hasattr(layer, "discarded_tensors")):
            discard_in(layer)


def parts_of_recomputed(module: nn.Module) -> Iterator[nn.Module]:
    """Yield what is inside a recomputed module, which is itself among them: all of it is computed again anyway."""
    for part in module.modules():
        if is_recomputed(part):
            yield from part.modules()


def _discard_outputs(module: nn.Module, plan: ParallelPlan, patterns: Sequence[str]) -> None:
    """Mark the cheap modules among those that are recomputed, except those inside another one."""
    made_cheaply = set(_matching(module, plan.cheap))
    cheap = [part for part in _matching(module, patterns) if part in made_cheaply]
    inside = {part for outer in module.modules() if is_recomputed(outer) for part in outer.modules() if part != outer}
    for part in cheap:
        if part not in inside:
            part.discards_output = True  # type: ignore[assignment]
    if any(getattr(part, "discards_output", False) for part in cheap):
        discard_in_layers(module, plan)
        _cast_once(module, plan)


def _cast_once(module: nn.Module, plan: ParallelPlan) -> None:
    """Let the matrices of a tensor block share one copy of a discarded output in autocast's dtype. Autocast itself
    makes one for each, which could not be discarded. Routers of experts read the output uncast."""
    for path, block in module.named_modules():
        if matches_any(plan.tensor_blocks, path) and not routes_tokens(path, block, plan):
            block.register_forward_pre_hook(_cast)


def routes_tokens(path: str, block: nn.Module, plan: ParallelPlan) -> bool:
    """Return whether a router or experts are inside the tensor block at ``path``."""
    routers = (*plan.experts.routers, *plan.experts.modules)
    return any(matches_any(routers, f"{path}.{name}") for name, _ in block.named_modules() if name)


def _cast(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    dropped = discarded_in(block)
    if dropped is None or not args or not isinstance(args[0], torch.Tensor) or dropped.recipe(args[0]) is None:
        return args
    return cast_discarded(block, args[0], compute_dtype(args[0])), *args[1:]


def is_recomputed(module: nn.Module) -> bool:
    """Return whether the forward of ``module`` runs its attribute ``computed`` twice."""
    return "computed" in vars(module)


class _Recomputed:
    @staticmethod
    def forward(part: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what masks of dropout depend on is an input of the graph
            return checkpoint(part.computed, *args, use_reentrant=False, **kwargs)
        dropped = discarded_in(part) if part.discards_output and not kwargs else None
        if dropped is not None:
            return discarded_output(part, part.computed, args, dropped)
        return checkpoint(part.computed, *args, use_reentrant=False, context_fn=_as_first, **kwargs)


def _as_first() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first computation and of the second, which may run during another micro-batch."""
    values = HostValues()
    return values.recorded(), _Both(at_border(step_of(None)), values.repeated())


class _Both(AbstractContextManager[None]):
    """Two contexts in one, which may be entered again."""

    def __init__(self, *contexts: AbstractContextManager[None]) -> None:
        self._contexts, self._entered = contexts, list[ExitStack]()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._entered.append(stack.pop_all())

    def __exit__(self, *raised: Any) -> None:
        self._entered.pop().__exit__(*raised)


def _matching(module: nn.Module, patterns: Sequence[str]) -> Iterator[nn.Module]:
    """Yield each module that a pattern names, once, without the placeholders of other stages."""
    for path, part in module.named_modules():
        if matches_any(patterns, path) and not isinstance(part, nn.Identity):
            yield part
