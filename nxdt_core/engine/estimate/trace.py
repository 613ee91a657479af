"""One micro-batch through a pipeline stage on the meta device: the memory that it keeps and needs, and what it sends.

Measured rather than derived: the stage is the module that would train, in its layout, so that recomputation, sequence
shards, gathered keys and a plugin's own operators count for what they are. :class:`LiveBytes` and :class:`WireBytes`
see every kernel that a real step would launch, with its true shapes. On real tensors they work too.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from nxdt_core.distributed.placement import local_of
from nxdt_core.engine.estimate.kernels import AcceleratorKernels
from nxdt_core.protocols.step_context import StepContext

GradientUse = Literal["accumulated", "fresh", "sharded"]
"""Use of a parameter's gradient in backward: added to an existing one, kept as the first one, or handed to a
reduction that leaves the whole one behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInput:
    """One micro-batch; its tensors are meta tensors."""

    first: torch.Tensor
    """Token ids int64 [micro_batch, seq] of the first stage; of any other hidden states, in the dtype within stages."""
    position_ids: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None
    step: StepContext | None = None
    """Context of the step; None for a stage whose forward does not take it."""
    sent: torch.dtype | None = None
    """Dtype of hidden states that are sent between stages; None: as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchTrace:
    """Sizes in bytes, of one rank."""

    kept: int
    """Held from forward to backward, the stage's output included, its input and the parameters not."""
    peak: Mapping[Phase, int]
    """Bytes that live at the highest moment of forward and backward; gradients with :data:`GradientUse` ``fresh``
    only."""
    sent: Mapping[str, int] = field(default_factory=dict)
    """Bytes sent in collectives, by mesh dimension."""


def trace_micro_batch(
    stage: nn.Module,
    given: StageInput,
    *,
    loss: Callable[[torch.Tensor], torch.Tensor] | None,
    holds_output: bool = True,
    gradients: GradientUse = "accumulated",
    masters: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    views: Iterable[torch.Tensor] = (),
    dimensions: Mapping[str, str] | None = None,
) -> MicroBatchTrace:
    """Run ``stage`` forward and backward on meta tensors.

    Args:
        stage: on the meta device, in its layout; its gradients are cleared afterwards.
        given: one micro-batch on the meta device.
        loss: from the logits to the scalar that backward starts from, on the last stage; None on others.
        holds_output: whether the output lives until backward is over, as stock pipeline stages have it.
        gradients: what becomes of them.
        masters: dtype of parameters that are kept apart from those of ``stage``, which get the gradients; None: those
            of ``stage`` keep them.
        autocast: dtype of matrix products under autocast.
        views: parameters that stand for views of others, see :class:`AcceleratorKernels`.
        dimensions: mesh dimension by name of its process group.
    """
    parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if gradients == "accumulated" else None
    first = given.first.detach()
    if first.is_floating_point():  # hidden states that another rank has sent
        first = first.to(given.sent or first.dtype).requires_grad_()
    before = [first, given.position_ids, given.document_ids, *stage.parameters(), *stage.buffers()]
    before += [parameter.grad for parameter in parameters]
    live = LiveBytes(tensor for tensor in before if tensor is not None)
    wire, kernels = WireBytes(dimensions or {}), AcceleratorKernels(autocast, views)
    with ExitStack() as stack:
        for parameter in parameters:
            taken = _gradient_hook(gradients, live, masters)
            stack.callback(parameter.register_post_accumulate_grad_hook(taken).remove)  # type: ignore[no-untyped-call]
        for mode in (kernels, live, wire):
            stack.enter_context(mode)
        named = {} if given.step is None else {"step": given.step}
        output = stage(first.to(given.first.dtype), given.position_ids, given.document_ids, **named)
        if loss is None and given.sent is not None:
            output = output.to(given.sent)
        kernels.end_forward()
        kept, live.phase = live.total, "workspace"
        outputs = [output] if holds_output else []
        if loss is not None:
            live.retag(output, "logits")
            live.phase = "logits"
            output.register_hook(lambda grad: live.enter("workspace"))
            output = loss(output)
        _backward(output)
        outputs.clear()
    for parameter in parameters:
        parameter.grad = None
    return MicroBatchTrace(kept=kept, peak=Counter(live.peak), sent=wire.sent)


@torch.no_grad()
def trace_forward(
    stage: nn.Module, given: StageInput, *, autocast: torch.dtype | None = None, views: Iterable[torch.Tensor] = ()
) -> tuple[int, torch.Tensor]:
    """Run ``stage`` forward without gradients; arguments as of :func:`trace_micro_batch`.

    Returns:
        The bytes at the fullest moment, its input and its parameters not counted, and its output.
    """
    before = [given.first, given.position_ids, given.document_ids, *stage.parameters(), *stage.buffers()]
    live = LiveBytes(tensor for tensor in before if tensor is not None)
    with AcceleratorKernels(autocast, views), live:
        output = stage(given.first, given.position_ids, given.document_ids, step=given.step)
    return sum(live.peak.values()), output


def _backward(output: torch.Tensor) -> None:
    """Run backward by the function that ``torch.autograd.backward`` calls in the end. A function mode would handle that
    one with itself switched off, and so miss the accelerator's kernels in what is recomputed."""
    grad = torch.empty_like(output)  # of a stage's output it comes from another rank, into a buffer like this one
    _engine_run_backward((output,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _gradient_hook(
    gradients: GradientUse, live: LiveBytes, masters: torch.dtype | None
) -> Callable[[torch.Tensor], None]:
    """Return the hook that a parameter calls when it has just received its gradient."""
    of_masters: list[torch.Tensor] = []  # live until the hook is removed

    def hook(parameter: torch.Tensor) -> None:
        if gradients == "fresh" and parameter.grad is not None:
            if masters is not None:
                of_masters.append(parameter.grad.to(masters))
            live.retag(parameter.grad if masters is None else of_masters[-1], "gradients")
        if gradients == "sharded" or masters is not None:
            parameter.grad = None

    return hook


Phase = Literal["activations", "logits", "workspace", "gradients"]
"""``activations`` are made by a stage's forward, ``logits`` are its last output, the loss and their gradients,
``workspace`` is what backward needs on the way (recomputed activations included), ``gradients`` are of parameters."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that were made inside the block and still live, and remembers the peak.

    Storages are counted once however many tensors view them, in the phase in which they were made.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        """``known``: tensors from outside whose storages are counted elsewhere; they must outlive the block."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: Phase = "activations"
        """Phase under which new storages are counted."""
        self.live: Counter[Phase] = Counter()
        """Bytes now, by the phase in which they were made."""
        self.peak: Counter[Phase] = Counter()
        """Bytes at the moment at which the sum was highest."""
        self._known = {local_of(tensor).untyped_storage()._cdata for tensor in known}
        self._phases: dict[int, Phase] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and note the storages of its results."""
        if DTensor in types:
            return NotImplemented  # its operators on local tensors come here next
        with torch._C.DisableTorchFunction():  # modes of functions have seen what led here
            result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not is_traceable_wrapper_subclass(leaf):
                self._note(leaf.untyped_storage())
        return result

    def enter(self, phase: Phase) -> None:
        """Count what is made from now on under ``phase``."""
        self.phase = phase

    def retag(self, tensor: torch.Tensor, phase: Phase) -> None:
        """Count the storage of ``tensor`` under another phase from now on."""
        storage = local_of(tensor).untyped_storage()
        old = self._phases.get(storage._cdata)
        if old is not None and old != phase:
            self._phases[storage._cdata] = phase
            self.live[old] -= storage.nbytes()
            self.live[phase] += storage.nbytes()

    @property
    def total(self) -> int:
        """Return the bytes that live now."""
        return sum(self.live.values())

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if not size or key in self._known or key in self._phases:
            return
        self._phases[key] = self.phase
        self.live[self.phase] += size
        weakref.finalize(storage, self._forget, key, size)
        if self.total > sum(self.peak.values()):
            self.peak = self.live.copy()

    def _forget(self, key: int, size: int) -> None:
        self.live[self._phases.pop(key)] -= size


class WireBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that this rank sends in collectives, by the mesh dimension of their group.

    By the algorithms that reach the lower bound (rings): an all-gather or reduce-scatter of n ranks sends
    ``(n - 1) / n`` of the whole, an all-reduce twice that (Thakur et al. 2005, doi:10.1177/1094342005051521).
    """

    def __init__(self, dimensions: Mapping[str, str]) -> None:
        """``dimensions``: dimension by name of a process group; the rest is counted as ``other``."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: Counter[str] = Counter()
        self._dimensions = dimensions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count ``func`` if it is a collective, then run it."""
        if DTensor in types:
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        rule = _SENT.get(name)
        if rule is None:
            return
        position, whole = rule
        group = _group(args)
        ranks = group.size()
        size = sum(leaf.nbytes for leaf in tree_leaves(args[position]))
        self.sent[self._dimensions.get(group.group_name, "other")] += round(size * whole(ranks))


def ring_share(ranks: int) -> float:
    """Return the share of the whole that each of ``ranks`` sends in an all-gather or a reduce-scatter."""
    return (ranks - 1) / ranks


def _others(ranks: int) -> float:
    return float(ranks - 1)


def _twice_share(ranks: int) -> float:
    return 2 * ring_share(ranks)


def _all(ranks: int) -> float:
    return 1.0


_SENT = {
    "allreduce_": (0, _twice_share),
    "allreduce_coalesced_": (0, _twice_share),
    "_allgather_base_": (0, ring_share),
    "allgather_": (0, ring_share),
    "allgather_into_tensor_coalesced_": (0, ring_share),
    "_reduce_scatter_base_": (1, ring_share),
    "reduce_scatter_": (1, ring_share),
    "reduce_scatter_tensor_coalesced_": (1, ring_share),
    "alltoall_base_": (1, ring_share),
    "alltoall_": (1, ring_share),
    "broadcast_": (0, ring_share),
    "send": (0, _all),
    "all_reduce": (0, _twice_share),
    "all_gather_into_tensor": (0, _others),
    "reduce_scatter_tensor": (0, ring_share),
    "all_to_all_single": (0, ring_share),
}
"""Collective → position of its argument that is counted, and the share of it that each of n ranks sends."""


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The process group among the arguments of a collective: an object in ``c10d``, a name in the functional ones."""
    for value in reversed(args):
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    return dist.distributed_c10d._resolve_process_group(args[-1])  # type: ignore[attr-defined]
