"""The memory of one rank at the fullest moment of a step, by what it is for.

It follows from the parameters of the rank's pipeline stages (how many elements the rank computes with, and how many of
them it stores), from the optimizer's state, and from what a micro-batch keeps
(:mod:`nxdt_core.engine.estimate.trace`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.distributed.buckets import buckets
from nxdt_core.distributed.collectives import BUCKET_BYTES
from nxdt_core.distributed.devices import HOST
from nxdt_core.distributed.placement import local_of, sharded_over
from nxdt_core.engine.data.fsdp import GatherDtypes, WeightStorage, outer_modules
from nxdt_core.engine.estimate.trace import MicroBatchTrace
from nxdt_core.engine.optim.state import stepped_once, unpacked_state
from nxdt_core.engine.optim.updates import BUCKET_ELEMENTS, AdamUpdates
from nxdt_core.engine.parameters import tables
from nxdt_core.engine.pipeline.schedules import Operation
from nxdt_core.models.patterns import matches, matches_any
from nxdt_core.models.quantised import QuantisedWeight
from nxdt_core.protocols.estimate import Memory
from nxdt_core.protocols.optimizer import OptimizerFactory, PackedState, ParameterShard
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.tensor_shards import TensorSlice

FIRST, LAST, ROOT = "<first>", "<last>", "<root>"
"""The embedding, and what is behind the layers, where FSDP2 gathers them for themselves; elements outside of all these
and of layers, which FSDP2 gathers first and frees last."""
_PROBE = 256
"""Elements in each dimension of a parameter that is large enough for packed state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """A parameter of a pipeline stage, as one rank holds it."""

    stage: int = 0
    """Number of the pipeline stage."""
    group: str = ""
    """What FSDP2 gathers it with: the path of a layer or of experts, or one of the places around the layers."""
    whole: int = 0
    """Elements of all tensor and expert parallel ranks."""
    local: int
    """Elements that the rank computes with, after tensor and expert parallelism."""
    stored: int
    """Elements of its shard under FSDP2, rows padded up; all of them where it is not sharded."""
    size_bytes: int = 0
    """Bytes of ``stored`` in its own dtype."""
    trained: bool = True
    two_byte: bool = False
    """It travels in autocast's dtype when it is gathered."""
    scaled: bool = False
    """It travels in one byte per element."""
    coded: bool = False
    """It is quantised, and FSDP2 leaves it alone."""
    expert: bool = False
    """``efsdp`` holds it instead of ``fsdp``."""
    resident: bool = False
    """It belongs to experts that no other rank has, and FSDP2 leaves it alone."""
    partial: bool = False
    """Tensor parallel ranks still have to sum its gradient."""
    state: float = 0.0
    """Bytes of optimizer state."""


def held_parameters(
    module: nn.Module,
    plan: ParallelPlan,
    storage: WeightStorage,
    *,
    stage: int = 0,
    partial: Collection[str] = (),
    forms: GatherDtypes,
    state: StateOf,
) -> list[HeldParameter]:
    """Return the parameters of a stage, tensor and expert parallelism applied and FSDP2 not.

    Args:
        module: on the meta device.
        plan: names layers and experts.
        storage: says how FSDP2 will shard.
        stage: its number.
        partial: names whose gradients are partial sums over ``tp``.
        forms: how FSDP2 gathers the weights.
        state: measures the optimizer state of a shard.
    """
    sizes, (outer_first, outer_last), others = storage.sizes, outer_modules(module, plan), tables([module], plan)
    places = {outer_first: FIRST, **dict.fromkeys(outer_last, LAST)}
    held = []
    for name, parameter in module.named_parameters():
        local, trains = local_of(parameter), parameter.requires_grad
        coded, expert = isinstance(local, QuantisedWeight), "ep" in sharded_over(parameter)
        ranks = (sizes.efsdp if expert else sizes.fsdp) if storage.sharded and not coded else 1
        # The first rank's shard along dimension 0; FSDP2 pads the others to the same size.
        shard = tuple(local.shape)
        shard = (-(-shard[0] // ranks), *shard[1:]) if shard else shard
        stored = math.prod(shard)
        # The innermost experts or layer that contains it, or the place outside of all.
        group, parts = ROOT, name.split(".")[:-1]
        for end in range(len(parts), 0, -1):
            path = ".".join(parts[:end])
            if matches_any(plan.experts.modules, path) or matches(plan.recompute_layer, path):
                group = path
            elif path in places:
                group = places[path]
            if group != ROOT:
                break
        held.append(
            HeldParameter(
                stage=stage,
                group=group,
                whole=parameter.numel(),
                local=local.numel(),
                stored=stored,
                size_bytes=local.storage_bytes if isinstance(local, QuantisedWeight) else stored * local.element_size(),
                trained=trains,
                two_byte=name in forms.two_byte,
                scaled=name in forms.scaled,
                coded=coded,
                expert=expert,
                resident=expert and storage.sharded and storage.experts_whole,
                partial=trains and name in partial,
                state=state(shard, name not in others).held if trains else 0.0,
            )
        )
    return held


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
    factory: OptimizerFactory, config: object, dtype: torch.dtype, *, two_byte: bool = False, more: float = 0.0
) -> StateOf:
    """Return a function that measures the state of a parameter by stepping the optimizer once on the meta device.

    An optimizer that reads values is stepped on the host, on a parameter of at most 256 elements per dimension; its
    state is taken to grow with the number of elements.

    Args:
        factory: builds the optimizer over parameter groups.
        config: section of the optimizer.
        dtype: dtype of the parameters that the optimizer gets.
        two_byte: whether float32 state of the parameter's shape is kept in two bytes.
        more: further bytes for each element.
    """

    @cache
    def stepped(shape: tuple[int, ...], matrix: bool, device: str) -> StateBytes:
        shard = ParameterShard(shape=shape, region=TensorSlice.whole(shape), matrix=matrix and len(shape) > 1)
        with torch.device(device), _Ones() if device == "meta" else nullcontext():  # type: ignore[no-untyped-call]
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
            optimizer = stepped_once(factory, config, [parameter], [shard])
            halves = two_byte and not isinstance(optimizer, PackedState)
            return StateBytes(
                held=_bytes(optimizer.state[parameter], parameter, two_byte=halves),
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


class _Ones(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reads 1 from any tensor of the meta device, such as a count of steps."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype, device=HOST).item()
        return func(*args, **(kwargs or {}))


def _bytes(state: Mapping[str, Any], parameter: torch.Tensor, *, two_byte: bool = False) -> float:
    """Return the size of the tensors in ``state`` that have dimensions."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
    halved = [
        value for value in tensors if two_byte and value.dtype == torch.float32 and value.shape == parameter.shape
    ]
    return sum(value.nbytes for value in tensors) - sum(value.nbytes / 2 for value in halved)


def needs_stand_ins(factory: OptimizerFactory, config: object) -> bool:
    """Return whether the optimizer works on float32 stand-ins of weights that are rounded stochastically."""
    return not AdamUpdates.handles(stepped_once(factory, config, [nn.Parameter(torch.zeros(16, 16))]))


def peak_memory(
    held: Sequence[HeldParameter],
    storage: WeightStorage,
    order: Iterable[Operation],
    traces: Mapping[int, MicroBatchTrace],
    received: int,
    *,
    stand_ins: bool = False,
) -> Memory:
    """Return the largest of four moments: the worst one of forward and backward, the first and the last reduction of
    gradients, and the update where that works on float32 stand-ins of rounded weights.

    Args:
        held: parameters of all stages of the rank.
        storage: how the ranks hold them.
        order: what the rank does in a step.
        traces: one micro-batch through each of the rank's stages, by stage.
        received: bytes of a micro-batch's hidden states that come from another rank; held like activations.
        stand_ins: whether the optimizer works on float32 stand-ins of rounded weights.
    """
    trained = sum(p.local for p in held if p.trained)
    trained_stored = sum(p.stored for p in held if p.trained)
    frozen = sum(p.size_bytes for p in held if not p.trained)
    state, zero_stage = sum(p.state for p in held), storage.sizes.zero_stage
    stored, optimizer, workspace = trained_stored * storage.stored_bytes, round(state), 0
    groups, first, last, root = gathered_groups(held)
    largest = sum(groups[:1])
    # Masters that are rounded in place have a copy while the rank computes.
    copies = 2 if storage.policy.stochastic_rounding else 1
    if storage.policy.master_weights:
        weights, masters, updated = frozen, copies * stored + optimizer, (frozen, stored + optimizer)
    else:
        weights, masters, updated = frozen + stored, optimizer, (frozen + stored, optimizer)
    gradient_bytes, whole_gradients = storage.gradient_bytes, trained * storage.gradient_bytes
    with_copies = weights + (trained * storage.compute_bytes if storage.copied else 0)
    if storage.cast_once:
        with_copies += storage.product_bytes * sum(p.local for p in held if p.scaled or (p.two_byte and p.trained))

    # While micro-batches run.
    kept, gradients, communication = with_copies, whole_gradients, 0
    if storage.sharded:
        gathered = _gathered_at_a_time(held)
        if zero_stage < 3:
            gathered = sum(p.local for p in held if not (p.resident or p.coded))
        kept += _computed_with(gathered, held, storage)
        if storage.gradient_use == "sharded":
            # Gradients of the root are reduced last. The head's are among them where it is tied to the embedding.
            gradients = trained_stored * gradient_bytes + root * storage.compute_bytes
            communication = largest * gradient_bytes
        if zero_stage == 3:
            communication += _computed_with(largest, held, storage)
            # What travels in autocast's dtype is kept in it until it is unpacked.
            frozen_two_byte = any(p.two_byte and not p.trained for p in held)
            travelling = 0 if frozen_two_byte else sum(p.local for p in held if p.two_byte)
            communication += largest * storage.product_bytes * travelling // max(sum(p.local for p in held), 1)
    if storage.gradient_use == "fresh":
        gradients = sum(trace.peak["gradients"] for trace in traces.values())
    computing = Memory(
        weights=kept,
        gradients=gradients,
        optimizer=masters,
        communication=communication,
        **_in_flight(order, traces, received),
    )
    moments = [computing]

    # FSDP2 reduces the modules behind the layers first: the logits are freed, all activations are kept, and gradients
    # are reduced from a flat copy into this rank's shard. The last gradients are reduced after the activations are
    # freed: by FSDP2 those of the embedding and the root, without it all of them, a bucket at a time.
    if storage.sharded:
        shard = gradient_bytes * trained_stored / max(trained, 1)
        whole = storage.compute_bytes if storage.gradient_use == "sharded" else shard
        flat = round(last * (gradient_bytes + whole))
        moments += [
            replace(computing, logits=0, workspace=0, communication=flat),
            Memory(
                weights=weights + root * storage.compute_bytes,
                gradients=(trained_stored + first + root) * gradient_bytes,
                optimizer=masters,
                communication=max(first, root) * gradient_bytes,
            ),
        ]
    else:
        flat = min(whole_gradients, BUCKET_BYTES) if storage.sizes.fsdp * storage.sizes.dp_replicate > 1 else 0
        reducing = Memory(weights=with_copies, gradients=whole_gradients, optimizer=masters, communication=flat)
        moments.append(reducing)

    # The update; stand-ins add a bucket of weights and gradients in float32, and of narrower state.
    if stand_ins:
        widened = 2.0 * torch.float32.itemsize
        if storage.policy.optimizer_state == "bfloat16":
            widened += state / max(trained_stored, 1)
        fullest = 0
        for _, of_stage in groupby(held, lambda p: p.stage):
            for bucket in buckets([p for p in of_stage if p.trained], lambda p: p.whole, BUCKET_ELEMENTS):
                fullest = max(fullest, sum(p.stored for p in bucket))
        workspace = round(fullest * widened)
    gradients = trained_stored * gradient_bytes if storage.sharded else whole_gradients
    moments.append(Memory(weights=updated[0], gradients=gradients, optimizer=updated[1], workspace=workspace))
    return max(moments, key=lambda moment: moment.total)


def gathered_groups(held: Iterable[HeldParameter]) -> tuple[list[int], int, int, int]:
    """Return the elements of the layers and experts that FSDP2 gathers, the largest first, and the most of what it
    gathers of a stage at the first place, the last one and the root."""
    groups = Counter[tuple[int, str]]()
    for p in held:
        groups[p.stage, p.group] += p.local * (not (p.resident or p.coded))
    first, last, root = (
        max((size for (_, group), size in groups.items() if group == place), default=0) for place in (FIRST, LAST, ROOT)
    )
    layers = [size for (_, group), size in groups.items() if group not in (FIRST, LAST, ROOT)]
    return sorted(layers, reverse=True), first, last, root


def _gathered_at_a_time(held: Sequence[HeldParameter]) -> int:
    """Elements of which ZeRO-3 holds the whole: the root, the part at work and the one that is fetched ahead."""
    groups, first, last, root = gathered_groups(held)
    return root + max(sum(groups[:2]), sum(groups[:1]) + max(first, last))


def gathered_bytes(held: Sequence[HeldParameter], storage: WeightStorage) -> int:
    """Return the bytes of gathered weights while a frozen model runs forward; 0 where none are sharded."""
    return _computed_with(_gathered_at_a_time(held), held, storage) if storage.sharded else 0


def _computed_with(elements: int, held: Sequence[HeldParameter], storage: WeightStorage) -> int:
    """Bytes of gathered elements, of which as many are frozen in autocast's dtype as among all."""
    two_byte = sum(p.local for p in held if p.two_byte and not p.trained)
    saved = (storage.compute_bytes - storage.product_bytes) * two_byte
    return elements * storage.compute_bytes - elements * saved // max(sum(p.local for p in held if not p.coded), 1)


def _in_flight(order: Iterable[Operation], traces: Mapping[int, MicroBatchTrace], received: int) -> dict[str, int]:
    """Return activations, logits and workspace at the fullest moment of the schedule.

    A backward in two passes keeps its activations until the second.
    """
    total, worst = 0, {"activations": 0, "logits": 0, "workspace": 0}
    for operation in order:
        trace = traces[operation.stage]
        added = trace.kept + (received if operation.stage > 0 else 0)
        if operation.kind == "forward":
            total += added
            continue
        peak = trace.peak
        moment = {
            "activations": total - trace.kept + peak["activations"],
            "logits": peak["logits"],
            "workspace": peak["workspace"],
        }
        if sum(moment.values()) > sum(worst.values()):
            worst = moment
        if operation.kind != "backward_input":
            total -= added
    return worst
