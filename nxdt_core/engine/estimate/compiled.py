"""What compiled layers keep for backward, in terms of layers as they are written.

Inductor cuts a layer's graph where the fewest bytes cross from forward to backward. It computes cheap operations again,
unless their result is the input of a matrix product: backward would have to write that to memory again. Measured on
the graphs of the models here; ``tests/parallel/estimate/test_estimate_compiled.py`` repeats it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nxdt_core.engine.dropped import cast_dropped
from nxdt_core.engine.recompute import apply_recompute, parts_of_recomputed
from nxdt_core.models.autocast import compute_dtype
from nxdt_core.models.patterns import matches, matches_any
from nxdt_core.protocols.plan import ParallelPlan

__all__ = ["keep_as_compiled"]


def keep_as_compiled(module: nn.Module, plan: ParallelPlan, *, gathers_again: bool) -> None:
    """Let the layers of ``module`` keep about what they keep when they are compiled.

    Activation functions keep their inputs and their result, and so do norms that are not one operation. The
    matrices of a tensor block share one copy of their input in autocast's dtype. If inputs are gathered again, they
    are made of the norms' inputs.

    Args:
        module: one pipeline stage on the meta device, recomputation applied, layers as they are written.
        plan: says what a layer is, and which of its modules are cheap.
        gathers_again: whether tensor blocks gather again what they read.
    """
    recomputed = set(parts_of_recomputed(module))
    functions, norms = [], []
    for path, part in _in_layers(module, plan):
        if hasattr(type(part), "computed"):
            continue
        if matches_any(plan.cheap, path):
            has_parameters = any(True for _ in part.parameters())
            if not has_parameters:
                functions.append(path)
            elif gathers_again and part not in recomputed:
                norms.append(path)
        elif any(matches(pattern.rpartition(".")[0], path) for pattern in plan.norms):
            functions.append(path)
        if matches_any(plan.tensor_blocks, path) and not _routes(path, part, plan):
            part.register_forward_pre_hook(_cast)
    again = replace(plan, recompute={"again": (*functions, *norms)}, cheap=tuple(norms))
    apply_recompute(module, again, granularity="selective", names=("again",))


def _in_layers(module: nn.Module, plan: ParallelPlan) -> Iterator[tuple[str, nn.Module]]:
    for path, layer in [*module.named_modules()]:
        if matches(plan.recompute_layer, path):
            yield from ((f"{path}.{name}", part) for name, part in [*layer.named_modules()] if name)


def _routes(path: str, block: nn.Module, plan: ParallelPlan) -> bool:
    routers = (*plan.experts.routers, *plan.experts.modules)
    return any(matches_any(routers, f"{path}.{name}") for name, _ in block.named_modules() if name)


def _cast(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if not args or not isinstance(args[0], torch.Tensor):
        return args
    return cast_dropped(block, args[0], compute_dtype(args[0])), *args[1:]
