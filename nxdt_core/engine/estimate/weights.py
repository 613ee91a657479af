"""Parameters of a pipeline stage on one rank: how many elements it computes with and how many of them it stores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.distributed.buckets import buckets
from nxdt_core.distributed.devices import HOST
from nxdt_core.distributed.placement import local_of, sharded_over
from nxdt_core.engine.data.collectives import GatherDtypes
from nxdt_core.engine.data.fsdp import OuterModules, outer_modules
from nxdt_core.engine.optim.adam import AdamUpdates
from nxdt_core.engine.optim.rounded_updates import BUCKET_ELEMENTS
from nxdt_core.engine.optim.state import stepped_once, unpacked_state
from nxdt_core.engine.parameters import tables
from nxdt_core.models.patterns import matches, matches_any
from nxdt_core.models.quantised import QuantisedWeight
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.optimizer import OptimizerFactory, PackedState, ParameterShard
from nxdt_core.protocols.piece import Box
from nxdt_core.protocols.plan import ParallelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Numbers of parameter elements on one rank."""

    local: int = 0
    """Elements that the rank computes with, after tensor and expert parallelism."""
    stored: int = 0
    """Elements of its shard under FSDP2, rows padded up; all of them where nothing is sharded."""
    trained: int = 0
    """The part of ``local`` that has gradients."""
    trained_stored: int = 0
    """The part of ``stored`` that has gradients."""
    frozen_narrow: int = 0
    """The part of ``local`` that is frozen, and stored in autocast's dtype."""
    frozen_bytes: int = 0
    """Bytes of the part of ``stored`` that is frozen."""
    groups: tuple[int, ...] = ()
    """Values of ``local`` of what FSDP2 gathers at a time (layers, experts), the largest first."""
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
    coded: int = 0
    """The part of ``local`` that is quantised, which FSDP2 leaves alone."""
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
    state: float = 0.0
    """Bytes of optimizer state."""
    bucket: int = 0
    """The most of ``trained_stored`` that an optimizer over rounded weights has in float32 at a time."""

    def __add__(self, other: ParameterCounts) -> ParameterCounts:
        """Return the counts of two pipeline stages of a rank: sums, and the larger of what is there one at a time."""

        def joined(name: str) -> Any:
            mine, theirs = getattr(self, name), getattr(other, name)
            if name in ("first", "last", "root", "bucket"):
                return max(mine, theirs)
            return tuple(sorted((*mine, *theirs), reverse=True)) if name == "groups" else mine + theirs

        return ParameterCounts(**{item.name: joined(item.name) for item in fields(self)})


_FIRST, _LAST, _ROOT = "<first>", "<last>", "<root>"


def count_parameters(
    stage: nn.Module,
    plan: ParallelPlan,
    sizes: MeshSizes,
    *,
    sharded: bool,
    partial: Iterable[str] = (),
    forms: GatherDtypes | None = None,
    keeps: bool = False,
    state: StateOf,
) -> ParameterCounts:
    """Count the parameters of ``stage``, tensor and expert parallelism applied and FSDP2 not.

    Args:
        stage: on the meta device.
        plan: names layers and experts.
        sizes: ranks over which FSDP2 will shard.
        sharded: whether FSDP2 will hold the parameters.
        partial: names whose gradients are partial sums over ``tp``.
        forms: how FSDP2 gathers the weights; None as it does by itself.
        keeps: whether FSDP2 leaves experts alone.
        state: measures the optimizer state of a shard.
    """
    counts, groups = Counter[str](), Counter[str]()
    sums, outer = frozenset(partial), outer_modules(stage, plan)
    narrow, scaled = (frozenset(), frozenset()) if forms is None else (forms.narrow, forms.scaled)
    trained: list[tuple[int, int]] = []  # elements of the whole, and of the shard
    state_bytes, others = 0.0, tables([stage], plan)
    for name, parameter in stage.named_parameters():
        local, trains = local_of(parameter), parameter.requires_grad
        size, coded = local.numel(), isinstance(local, QuantisedWeight)
        expert = "ep" in sharded_over(parameter)
        ranks = (sizes.efsdp if expert else sizes.fsdp) if sharded and not coded else 1
        shard = _shard(tuple(local.shape), ranks)
        stored = math.prod(shard)
        group, is_narrow = _group_of(name, plan, outer), name in narrow
        groups[group] += size * (not ((expert and keeps) or coded))
        counts.update(local=size, stored=stored, coded=size * coded, narrow=size * is_narrow)
        counts.update(scaled=size * (name in scaled), scales=name in scaled)
        counts.update(experts=size * expert, experts_kept=size * (expert and keeps))
        counts.update(experts_narrow=size * (expert and is_narrow), experts_trained=size * (expert and trains))
        counts.update(ends_narrow=size * (is_narrow and group in (_FIRST, _LAST)))
        if trains:
            trained.append((parameter.numel(), stored))
            counts.update(trained=size, trained_stored=stored, partial=size * (name in sums))
            state_bytes += state(shard, name not in others).held
        else:
            size_bytes = local.held_bytes if isinstance(local, QuantisedWeight) else stored * parameter.element_size()
            counts.update(frozen_bytes=size_bytes, frozen_narrow=size * is_narrow)
    first, last, root = (groups.pop(group, 0) for group in (_FIRST, _LAST, _ROOT))
    of_buckets = (sum(stored for _, stored in bucket) for bucket in buckets(trained, itemgetter(0), BUCKET_ELEMENTS))
    return ParameterCounts(
        **counts,
        groups=tuple(sorted(groups.values(), reverse=True)),
        first=first,
        last=last,
        root=root,
        state=state_bytes,
        bucket=max(of_buckets, default=0),
    )


def count_unique(module: nn.Module) -> tuple[int, int]:
    """Return all elements of a whole model and those that are trained, tied parameters once."""
    parameters = list(module.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Optimizer state of one parameter in bytes."""

    held: float
    saved: float
    """Bytes in checkpoints."""


StateOf = Callable[[tuple[int, ...], bool], StateBytes]
"""Takes a parameter's shape on this rank, and whether it is a matrix of a hidden layer."""


def optimizer_state(
    factory: OptimizerFactory, config: object, dtype: torch.dtype, *, narrow: bool = False, more: float = 0.0
) -> StateOf:
    """Return a function that measures the state of a parameter by stepping the optimizer once on the meta device.

    An optimizer that reads values is stepped on the host, on a parameter of at most 256 elements per dimension; its
    state is taken to grow with the number of elements.

    Args:
        factory: builds the optimizer over parameter groups.
        config: section of the optimizer.
        dtype: dtype of the parameters that the optimizer gets.
        narrow: whether float32 state of the parameter's shape is kept in two bytes.
        more: further bytes for each element.
    """

    @cache
    def stepped(shape: tuple[int, ...], matrix: bool, device: str) -> StateBytes:
        shard = ParameterShard(shape=shape, box=Box.whole(shape), matrix=matrix and len(shape) > 1)
        with torch.device(device), _Ones() if device == "meta" else nullcontext():  # type: ignore[no-untyped-call]
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
            optimizer = stepped_once(factory, config, [parameter], [shard])
            halves = narrow and not isinstance(optimizer, PackedState)
            return StateBytes(
                held=_bytes(optimizer.state[parameter], parameter, narrow=halves),
                saved=_bytes(unpacked_state(optimizer, parameter), parameter),
            )

    @cache
    def measured(shape: tuple[int, ...], matrix: bool) -> StateBytes:
        try:
            state, scale = stepped(shape, matrix, "meta"), 1.0
        except Exception:  # of any library
            small = tuple(min(size, _PROBE) for size in shape)
            state, scale = stepped(small, matrix, HOST.type), math.prod(shape) / max(math.prod(small), 1)
        further = more * math.prod(shape)
        return StateBytes(held=state.held * scale + further, saved=state.saved * scale + further)

    return measured


_PROBE = 256
"""Elements in each dimension of a parameter that is large enough for packed state."""


class _Ones(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reads 1 from any tensor of the meta device, such as a count of steps."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype, device=HOST).item()
        return func(*args, **(kwargs or {}))


def _bytes(state: Mapping[str, Any], parameter: torch.Tensor, *, narrow: bool = False) -> float:
    """Return the size of the tensors in ``state`` that have dimensions."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
    halved = [value for value in tensors if narrow and value.dtype == torch.float32 and value.shape == parameter.shape]
    return sum(value.nbytes for value in tensors) - sum(value.nbytes / 2 for value in halved)


def needs_stand_ins(factory: OptimizerFactory, config: object) -> bool:
    """Return whether the optimizer works on float32 stand-ins of weights that are rounded stochastically."""
    return not AdamUpdates.handles(stepped_once(factory, config, [nn.Parameter(torch.zeros(16, 16))]))


def _shard(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return the shape of the first rank's shard along dimension 0; FSDP2 pads the others to the same size."""
    return (-(-shape[0] // ranks), *shape[1:]) if shape else shape


def _group_of(name: str, plan: ParallelPlan, outer: OuterModules) -> str:
    """The innermost experts or layer that contains ``name``, or the place outside of all."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        path = ".".join(parts[:end])
        if matches_any(plan.experts.modules, path) or matches(plan.recompute_layer, path):
            return path
        if path == outer.first or path in outer.last:
            return _FIRST if path == outer.first else _LAST
    return _ROOT
