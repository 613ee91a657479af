"""Parameters of a pipeline stage on one rank: how many elements it computes with and how many of them it stores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nxdt_core.distributed.placement import local_of, sharded_over
from nxdt_core.nn.patterns import matches, matches_any
from nxdt_core.parallel.data.fsdp import Ends, ends_of
from nxdt_core.parallel.data.gathers import GatherForms
from nxdt_core.parallel.rounding.adam import AdamUpdates
from nxdt_core.parallel.rounding.updates import in_buckets
from nxdt_core.protocols.optimizer import OptimizerFactory, PackedState
from nxdt_core.protocols.parallel.mesh import MeshSizes
from nxdt_core.protocols.plan import ParallelPlan

__all__ = [
    "ParameterCounts",
    "StateBytes",
    "count_parameters",
    "count_unique",
    "needs_stand_ins",
    "state_bytes_per_element",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Numbers of parameter elements on one rank."""

    local: int = 0
    """What it computes with, after tensor and expert parallelism."""
    stored: int = 0
    """Its shard of these under FSDP2, rows padded up; all of them where nothing is sharded."""
    trained: int = 0
    """The part of ``local`` that has gradients."""
    trained_stored: int = 0
    """The part of ``stored`` that has gradients."""
    groups: tuple[int, ...] = ()
    """``local`` of layers and experts by what FSDP2 gathers at a time, the largest first."""
    first: int = 0
    """Elements of the embedding, where FSDP2 gathers it for itself."""
    last: int = 0
    """Elements of what is behind the layers, where FSDP2 gathers it for itself."""
    ends_narrow: int = 0
    """The part of ``first`` and ``last`` that travels in autocast's dtype."""
    root: int = 0
    """Elements outside of all these, which FSDP2 gathers first and frees last."""
    narrow: int = 0
    """The part of ``local`` that travels in autocast's dtype when it is gathered."""
    scaled: int = 0
    """The part of ``local`` that travels in one byte per element."""
    scales: int = 0
    """Number of parameters that do so."""
    experts: int = 0
    """The part of ``local`` that ``efsdp`` holds instead of ``fsdp``."""
    experts_kept: int = 0
    """The part of ``experts`` that no other rank has and FSDP2 leaves alone."""
    experts_narrow: int = 0
    """The part of ``experts`` that travels in autocast's dtype."""
    experts_trained: int = 0
    """The part of ``experts`` that has gradients."""
    partial: int = 0
    """Elements whose gradients tensor parallel ranks still have to sum."""
    bucket: int = 0
    """The most of ``trained_stored`` that an optimizer over rounded weights has in float32 at a time."""

    def __add__(self, other: ParameterCounts) -> ParameterCounts:
        """Return the sum of the counts of two pipeline stages of a rank."""
        return ParameterCounts(
            local=self.local + other.local,
            stored=self.stored + other.stored,
            trained=self.trained + other.trained,
            trained_stored=self.trained_stored + other.trained_stored,
            groups=tuple(sorted((*self.groups, *other.groups), reverse=True)),
            first=max(self.first, other.first),
            last=max(self.last, other.last),
            ends_narrow=self.ends_narrow + other.ends_narrow,
            root=max(self.root, other.root),
            narrow=self.narrow + other.narrow,
            scaled=self.scaled + other.scaled,
            scales=self.scales + other.scales,
            experts=self.experts + other.experts,
            experts_kept=self.experts_kept + other.experts_kept,
            experts_narrow=self.experts_narrow + other.experts_narrow,
            experts_trained=self.experts_trained + other.experts_trained,
            partial=self.partial + other.partial,
            bucket=max(self.bucket, other.bucket),
        )


_FIRST, _LAST, _ROOT = "<first>", "<last>", "<root>"


@dataclass(slots=True)
class _Tally:
    counts: Counter[str] = field(default_factory=Counter)
    groups: Counter[str] = field(default_factory=Counter)


def count_parameters(
    stage: nn.Module,
    plan: ParallelPlan,
    sizes: MeshSizes,
    *,
    sharded: bool,
    partial: Iterable[str] = (),
    forms: GatherForms | None = None,
    keeps: bool = False,
) -> ParameterCounts:
    """Count the parameters of ``stage``, tensor and expert parallelism applied and FSDP2 not.

    Args:
        stage: on the meta device.
        plan: names layers and experts.
        sizes: of the mesh.
        sharded: whether FSDP2 will hold the parameters.
        partial: names whose gradients are partial sums over ``tp``.
        forms: how FSDP2 gathers the weights; None as it does by itself.
        keeps: whether FSDP2 leaves experts alone.
    """
    tally, sums, ends = _Tally(), frozenset(partial), ends_of(stage, plan)
    narrow, scaled = (frozenset(), frozenset()) if forms is None else (forms.narrow, forms.scaled)
    trained: dict[str, tuple[int, int]] = {}
    for name, parameter in stage.named_parameters():
        local = local_of(parameter)
        expert = "ep" in sharded_over(parameter)
        ranks = sizes.efsdp if expert else sizes.fsdp
        stored = _shard(tuple(local.shape), ranks) if sharded else local.numel()
        tally.counts["local"] += local.numel()
        tally.counts["stored"] += stored
        tally.counts["narrow"] += local.numel() * (name in narrow)
        tally.counts["scaled"] += local.numel() * (name in scaled)
        tally.counts["scales"] += name in scaled
        tally.counts["experts"] += local.numel() * expert
        tally.counts["experts_kept"] += local.numel() * (expert and keeps)
        tally.counts["experts_narrow"] += local.numel() * (expert and name in narrow)
        tally.counts["experts_trained"] += local.numel() * (expert and parameter.requires_grad)
        if parameter.requires_grad:
            trained[name] = parameter.numel(), stored
            tally.counts["trained"] += local.numel()
            tally.counts["trained_stored"] += stored
            tally.counts["partial"] += local.numel() * (name in sums)
        group = _group_of(name, plan, ends)
        tally.groups[group] += local.numel() * (not (expert and keeps))
        tally.counts["ends_narrow"] += local.numel() * (group in (_FIRST, _LAST) and name in narrow)
    first, last, root = (tally.groups.pop(group, 0) for group in (_FIRST, _LAST, _ROOT))
    buckets = in_buckets({name: whole for name, (whole, _) in trained.items()})
    return ParameterCounts(
        **tally.counts,
        groups=tuple(sorted(tally.groups.values(), reverse=True)),
        first=first,
        last=last,
        root=root,
        bucket=max((sum(trained[name][1] for name in bucket) for bucket in buckets), default=0),
    )


def count_unique(module: nn.Module) -> tuple[int, int]:
    """Return all elements of a whole model and those that are trained, tied parameters once."""
    parameters = list(module.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Optimizer state in bytes for each trained element."""

    held: float
    saved: float
    """In checkpoints."""


def state_bytes_per_element(
    factory: OptimizerFactory, config: object, dtype: torch.dtype, *, narrow: bool = False
) -> StateBytes:
    """Return the state that the optimizer keeps for each element of a parameter, by stepping it once on a small one.

    Args:
        factory: of the optimizer.
        config: its section.
        dtype: of the parameter that it sees.
        narrow: whether float32 state of the parameter's shape is kept in two bytes.
    """
    parameter = nn.Parameter(torch.zeros(_PROBE, _PROBE, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = _over(parameter, factory, config)
    optimizer.step()
    packs, state = isinstance(optimizer, PackedState), optimizer.state[parameter]
    saved = optimizer.unpacked(parameter) if isinstance(optimizer, PackedState) else state

    def size(leaves: Mapping[str, Any]) -> float:
        tensors = [value for value in leaves.values() if isinstance(value, torch.Tensor) and value.dim()]
        alike = [value for value in tensors if value.shape == parameter.shape or (packs and leaves is state)]
        halved = [value for value in alike if narrow and value.dtype == torch.float32 and not packs]
        return (sum(value.nbytes for value in alike) - sum(value.nbytes // 2 for value in halved)) / parameter.numel()

    return StateBytes(held=size(state), saved=size(saved))


_PROBE = 256
"""Rows and columns of a parameter that is large enough for packed state."""


def needs_stand_ins(factory: OptimizerFactory, config: object) -> bool:
    """Return whether the optimizer works on float32 stand-ins of weights that are rounded stochastically."""
    return not AdamUpdates.handles(_over(nn.Parameter(torch.zeros(16, 16)), factory, config))


def _over(parameter: nn.Parameter, factory: OptimizerFactory, config: object) -> Optimizer:
    group = {"params": [parameter], "names": ["probe"], "lr": getattr(config, "lr", 0.0), "weight_decay": 0.0}
    return factory([group], config)  # type: ignore[list-item]


def _shard(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of the first rank's shard along dimension 0; FSDP2 pads the others to the same size."""
    rows, rest = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    return -(-rows // ranks) * rest


def _group_of(name: str, plan: ParallelPlan, ends: Ends) -> str:
    """The innermost experts or layer that contains ``name``, or the place outside of all."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        path = ".".join(parts[:end])
        if matches_any(plan.experts, path) or matches(plan.recompute_layer, path):
            return path
        if path == ends.first or path in ends.last:
            return _FIRST if path == ends.first else _LAST
    return _ROOT
