"""Parameters of a pipeline stage on one rank: how many elements it computes with and how many of them it stores.

The bytes of one rank at the fullest moment of a step, by what they are for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nxdt_core.distributed.buckets import buckets
from nxdt_core.distributed.collectives import BUCKET_BYTES
from nxdt_core.distributed.devices import HOST
from nxdt_core.distributed.placement import local_of, sharded_over
from nxdt_core.engine.data.fsdp import GatherDtypes, outer_modules
from nxdt_core.engine.estimate.trace import GradientUse, MicroBatchTrace
from nxdt_core.engine.optim.state import stepped_once, unpacked_state
from nxdt_core.engine.optim.updates import BUCKET_ELEMENTS, AdamUpdates
from nxdt_core.engine.parameters import tables
from nxdt_core.engine.pipeline.schedules import Operation
from nxdt_core.models.patterns import matches, matches_any
from nxdt_core.models.quantised import QuantisedWeight
from nxdt_core.protocols.estimate import Memory
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.optimizer import OptimizerFactory, PackedState, ParameterShard
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.precision import DType, PrecisionPolicy
from nxdt_core.protocols.tensor_shards import TensorSlice


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
    frozen_two_byte: int = 0
    """The part of ``local`` that is frozen, and stored in autocast's dtype."""
    frozen_bytes: int = 0
    """Bytes of the part of ``stored`` that is frozen."""
    groups: tuple[int, ...] = ()
    """Values of ``local`` of what FSDP2 gathers at a time (layers, experts), the largest first."""
    first: int = 0
    """Elements of the embedding, where FSDP2 gathers it for itself."""
    last: int = 0
    """Elements of what is behind the layers, where FSDP2 gathers it for itself."""
    ends_two_byte: int = 0
    """The part of ``first`` and ``last`` that travels in autocast's dtype."""
    root: int = 0
    """Elements outside of all these, which FSDP2 gathers first and frees last."""
    two_byte: int = 0
    """The part of ``local`` that travels in autocast's dtype when it is gathered."""
    scaled: int = 0
    """The part of ``local`` that travels in one byte per element."""
    scales: int = 0
    """Number of parameters that do so."""
    coded: int = 0
    """The part of ``local`` that is quantised, which FSDP2 leaves alone."""
    experts: int = 0
    """The part of ``local`` that ``efsdp`` holds instead of ``fsdp``."""
    experts_resident: int = 0
    """The part of ``experts`` that no other rank has and FSDP2 leaves alone."""
    experts_two_byte: int = 0
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
    forms: GatherDtypes,
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
        forms: how FSDP2 gathers the weights.
        keeps: whether FSDP2 leaves experts alone.
        state: measures the optimizer state of a shard.
    """
    counts, groups = Counter[str](), Counter[str]()
    sums, (outer_first, outer_last) = frozenset(partial), outer_modules(stage, plan)
    trained: list[tuple[int, int]] = []  # elements of the whole, and of the shard
    state_bytes, others = 0.0, tables([stage], plan)
    for name, parameter in stage.named_parameters():
        local, trains = local_of(parameter), parameter.requires_grad
        size, coded = local.numel(), isinstance(local, QuantisedWeight)
        expert = "ep" in sharded_over(parameter)
        ranks = (sizes.efsdp if expert else sizes.fsdp) if sharded and not coded else 1
        # The first rank's shard along dimension 0; FSDP2 pads the others to the same size.
        shard = tuple(local.shape)
        shard = (-(-shard[0] // ranks), *shard[1:]) if shard else shard
        stored = math.prod(shard)
        # The innermost experts or layer that contains it, or the place outside of all.
        group, is_two_byte, parts = _ROOT, name in forms.two_byte, name.split(".")[:-1]
        for end in range(len(parts), 0, -1):
            path = ".".join(parts[:end])
            if matches_any(plan.experts.modules, path) or matches(plan.recompute_layer, path):
                group = path
            elif path == outer_first or path in outer_last:
                group = _FIRST if path == outer_first else _LAST
            if group != _ROOT:
                break
        groups[group] += size * (not ((expert and keeps) or coded))
        counts.update(local=size, stored=stored, coded=size * coded, two_byte=size * is_two_byte)
        counts.update(scaled=size * (name in forms.scaled), scales=name in forms.scaled)
        counts.update(experts=size * expert, experts_resident=size * (expert and keeps))
        counts.update(experts_two_byte=size * (expert and is_two_byte), experts_trained=size * (expert and trains))
        counts.update(ends_two_byte=size * (is_two_byte and group in (_FIRST, _LAST)))
        if trains:
            trained.append((parameter.numel(), stored))
            counts.update(trained=size, trained_stored=stored, partial=size * (name in sums))
            state_bytes += state(shard, name not in others).held
        else:
            size_bytes = (
                local.storage_bytes if isinstance(local, QuantisedWeight) else stored * parameter.element_size()
            )
            counts.update(frozen_bytes=size_bytes, frozen_two_byte=size * is_two_byte)
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


_BYTES: Mapping[DType, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageLayout:
    """Sharding of parameters, gradients and optimizer state over the ranks, and the dtype of each."""

    policy: PrecisionPolicy
    zero_stage: int
    sharded: bool
    """FSDP2 holds the parameters."""
    replicated: bool
    """Other ranks hold the same parameters, unless these are sharded."""
    accumulates: bool
    """A step has several micro-batches."""
    cast_once: bool = False
    """A step has one copy of the trained weights of matrix products, in autocast's dtype."""
    stand_ins: bool = False
    """The optimizer works on float32 stand-ins of weights that are rounded."""

    @property
    def compute_bytes(self) -> int:
        """Return the bytes per element of a parameter in forward and backward."""
        return _BYTES[self.policy.parameters]

    @property
    def product_bytes(self) -> int:
        """Return the bytes per element of what matrix products compute with."""
        return _BYTES[self.policy.autocast or self.policy.parameters]

    @property
    def stored_bytes(self) -> int:
        """Return the bytes per element of a trained parameter in storage; a frozen one has its dtype in forward."""
        return _BYTES["float32"] if self.policy.master_weights else self.compute_bytes

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes per element of an accumulated gradient."""
        return _BYTES[self.policy.gradients]

    @property
    def copied(self) -> bool:
        """Return whether masters have copies that are computed with, without FSDP2."""
        return self.policy.master_weights and not self.sharded

    @property
    def gradient_use(self) -> GradientUse:
        """Return what happens to a micro-batch's gradients."""
        if self.sharded and (self.zero_stage >= 2 or not self.accumulates):
            return "sharded"
        if not self.accumulates:
            return "fresh"
        return "sharded" if self.copied else "accumulated"  # copies' are added to those of the masters


def peak_memory(
    counts: ParameterCounts,
    storage: StorageLayout,
    order: Iterable[Operation],
    traces: Mapping[int, MicroBatchTrace],
    received: int,
) -> Memory:
    """Return the largest of four moments: the worst one of forward and backward, the first and the last reduction of
    gradients, and the update where that works on float32 stand-ins of rounded weights.

    Args:
        counts: parameters of all stages of the rank.
        storage: their layout.
        order: what the rank does in a step.
        traces: one micro-batch through each of the rank's stages, by stage.
        received: bytes of a micro-batch's hidden states that come from another rank; held like activations.
    """
    stored, optimizer = counts.trained_stored * storage.stored_bytes, round(counts.state)
    frozen, largest, workspace = counts.frozen_bytes, sum(counts.groups[:1]), 0
    # Masters that are rounded in place have a copy while the rank computes.
    copies = 2 if storage.policy.stochastic_rounding else 1
    if storage.policy.master_weights:
        weights, masters, updated = frozen, copies * stored + optimizer, (frozen, stored + optimizer)
    else:
        weights, masters, updated = frozen + stored, optimizer, (frozen + stored, optimizer)
    gradient_bytes, whole_gradients = storage.gradient_bytes, counts.trained * storage.gradient_bytes
    with_copies = weights + (counts.trained * storage.compute_bytes if storage.copied else 0)
    if storage.cast_once:
        with_copies += (counts.two_byte + counts.scaled - counts.frozen_two_byte) * storage.product_bytes

    # While micro-batches run.
    held, gradients, communication = with_copies, whole_gradients, 0
    if storage.sharded:
        gathered = _gathered_at_a_time(counts)
        if storage.zero_stage < 3:
            gathered = counts.local - counts.experts_resident - counts.coded
        held += _computed_with(gathered, counts, storage)
        if storage.gradient_use == "sharded":
            # Gradients of the root are reduced last. The head's are among them where it is tied to the embedding.
            gradients = counts.trained_stored * gradient_bytes + counts.root * storage.compute_bytes
            communication = largest * gradient_bytes
        if storage.zero_stage == 3:
            communication += _computed_with(largest, counts, storage)
            # What travels in autocast's dtype is kept in it until it is unpacked.
            travelling = 0 if counts.frozen_two_byte else counts.two_byte
            communication += largest * storage.product_bytes * travelling // max(counts.local, 1)
    if storage.gradient_use == "fresh":
        gradients = sum(trace.peak["gradients"] for trace in traces.values())
    computing = Memory(
        weights=held,
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
        shard = gradient_bytes * counts.trained_stored / max(counts.trained, 1)
        whole = storage.compute_bytes if storage.gradient_use == "sharded" else shard
        flat = round(counts.last * (gradient_bytes + whole))
        remaining = counts.trained_stored + counts.first + counts.root
        moments += [
            replace(computing, logits=0, workspace=0, communication=flat),
            Memory(
                weights=weights + counts.root * storage.compute_bytes,
                gradients=remaining * gradient_bytes,
                optimizer=masters,
                communication=max(counts.first, counts.root) * gradient_bytes,
            ),
        ]
    else:
        flat = min(whole_gradients, BUCKET_BYTES) if storage.replicated else 0
        reducing = Memory(weights=with_copies, gradients=whole_gradients, optimizer=masters, communication=flat)
        moments.append(reducing)

    # The update; stand-ins add a bucket of weights and gradients in float32, and of narrower state.
    if storage.stand_ins:
        widened = 2.0 * _BYTES["float32"]
        if storage.policy.optimizer_state == "bfloat16":
            widened += counts.state / max(counts.trained_stored, 1)
        workspace = round(counts.bucket * widened)
    gradients = counts.trained_stored * gradient_bytes if storage.sharded else whole_gradients
    moments.append(Memory(weights=updated[0], gradients=gradients, optimizer=updated[1], workspace=workspace))
    return max(moments, key=lambda moment: moment.total)


def _gathered_at_a_time(counts: ParameterCounts) -> int:
    """Elements of which ZeRO-3 holds the whole: the root, the part at work and the one that is fetched ahead."""
    largest, two = sum(counts.groups[:1]), sum(counts.groups[:2])
    return counts.root + max(two, largest + max(counts.first, counts.last))


def gathered_bytes(counts: ParameterCounts, storage: StorageLayout) -> int:
    """Return the bytes of gathered weights while a frozen model runs forward; 0 where none are sharded."""
    return _computed_with(_gathered_at_a_time(counts), counts, storage) if storage.sharded else 0


def _computed_with(elements: int, counts: ParameterCounts, storage: StorageLayout) -> int:
    """Bytes of gathered elements, of which as many are frozen in autocast's dtype as among all."""
    saved = (storage.compute_bytes - storage.product_bytes) * counts.frozen_two_byte
    return elements * storage.compute_bytes - elements * saved // max(counts.local - counts.coded, 1)


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
