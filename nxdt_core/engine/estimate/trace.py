"""One micro-batch through a pipeline stage on the meta device: the memory that it keeps and needs, and what it sends.

Measured rather than derived: the stage is the module that would train, in its layout, so that recomputation, sequence
shards, gathered keys and a plugin's own operators count for what they are. :class:`LiveBytes` and :class:`WireBytes`
see every kernel that a real step would launch, with its true shapes. On real tensors they work too.

The meta device composes attention and RMSNorm of small operations, which keep scores of seq x seq and several copies of
the activations; every accelerator has one kernel for each, which keeps its inputs, its output and one number a row.
The meta device has no autocast either. :class:`AcceleratorKernels` replaces these.

Inductor cuts a layer's graph where the fewest bytes cross from forward to backward. It computes cheap operations again,
unless their result is the input of a matrix product: backward would have to write that to memory again. A product that
casts its inputs to one byte writes them anyhow, so that they are computed again. :func:`keep_as_compiled` does the
same. Measured on the graphs of the models here, which ``tests/engine/estimate/test_estimate_compiled.py`` repeats, and
for float8 on a GPU.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from nxdt_core.distributed.devices import HOST
from nxdt_core.distributed.placement import local_of
from nxdt_core.engine.data.fsdp import GradientUse
from nxdt_core.engine.recompute import (
    apply_recompute,
    cast_discarded,
    is_recomputed,
    parts_of_recomputed,
    routes_tokens,
)
from nxdt_core.models.autocast import compute_dtype
from nxdt_core.models.patterns import matches, matches_any, modules_at
from nxdt_core.protocols.plan import ParallelPlan

_CAST = {
    functional.scaled_dot_product_attention,
    functional.linear,
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.einsum,
    functional.conv1d,
}
"""Operators of language models that autocast runs in its dtype."""
Phase = Literal["activations", "logits", "workspace", "gradients"]
"""``activations`` are made by a stage's forward, ``logits`` are its last output, the loss and their gradients,
``workspace`` is what backward needs on the way (recomputed activations included), ``gradients`` are of parameters."""


class AcceleratorKernels(TorchFunctionMode):
    """Within the block, calls of ``torch`` behave in shapes, dtypes and saved tensors as on an accelerator."""

    def __init__(self, autocast: torch.dtype | None = None, views: Iterable[torch.Tensor] = ()) -> None:
        """
        Args:
            autocast: dtype of matrix products; None for that of their inputs.
            views: parameters that stand for views of others. Autocast keeps its copies of weights for as long as its
                block lasts, of views it makes a new one each time.
        """
        super().__init__()
        self._autocast = autocast
        self._views = {id(tensor) for tensor in views}
        self._casts: dict[int, torch.Tensor] | None = {}
        self._planned = torch.autocast(HOST.type, dtype=autocast, enabled=autocast is not None)

    def __enter__(self) -> Any:
        """Enter the block."""
        self._planned.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        """Leave the block."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._planned.__exit__(*raised)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` or its replacement."""
        kwargs = kwargs or {}
        if self._autocast is not None and func in _CAST:
            args = tuple(self._cast(value) for value in args)
            kwargs = {name: self._cast(value) for name, value in kwargs.items()}
        return _REPLACED.get(func, func)(*args, **kwargs)

    def end_forward(self) -> None:
        """Forget the copies of weights that autocast keeps until the end of forward's block; a recomputed part keeps
        only its own."""
        self._casts = None

    def _cast(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        if self._casts is None or not (value.is_leaf and value.requires_grad) or id(value) in self._views:
            return value.to(self._autocast)
        if id(value) not in self._casts:  # leaves outlive the block
            self._casts[id(value)] = value.to(self._autocast)
        return self._casts[id(value)]


class _Attention(torch.autograd.Function):
    """Keeps what flash attention keeps (Dao et al. 2022, arXiv:2205.14135): inputs, output, a log-sum-exp per row."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        # Heads are adjacent in memory, so that joining them again needs no copy.
        *batch, heads, rows, _ = query.shape
        output = query.new_empty(*batch, rows, heads, value.shape[-1]).transpose(-3, -2)
        row_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, row_sums, mask)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        scale = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, scale)
        dtype = hidden.dtype if weight is None else torch.promote_types(hidden.dtype, weight.dtype)
        return torch.empty_like(hidden, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, weight, _ = ctx.saved_tensors
        return torch.empty_like(hidden), None if weight is None else torch.empty_like(weight)


class _CastingProduct(torch.autograd.Function):
    """Shapes of a :class:`~nxdt_core.protocols.precision.LinearProduct` in a compiled layer; keeps no inputs."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.inputs = hidden.shape, hidden.dtype
        return hidden.new_empty((*hidden.shape[:-1], weight.shape[0]), dtype=compute_dtype(hidden))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (weight,), (shape, dtype) = ctx.saved_tensors, ctx.inputs
        return grad.new_empty(shape, dtype=dtype), torch.empty_like(weight)


def _dropout(hidden: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """The fused kernel keeps a mask of one byte per element, the composition one of the input's dtype."""
    return torch.native_dropout(hidden, p, training)[0] if training and p else hidden


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, **_: Any
) -> Any:
    return _Attention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]


def _rms_norm(hidden: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: float | None = None) -> Any:
    return _RmsNorm.apply(hidden, weight)  # type: ignore[no-untyped-call]


_REPLACED: dict[Any, Callable[..., Any]] = {
    functional.scaled_dot_product_attention: _attention,
    functional.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    functional.dropout: _dropout,
}


def keep_as_compiled(module: nn.Module, plan: ParallelPlan, *, regathers: bool) -> None:
    """Let the layers of ``module`` save for backward about what they save when they are compiled.

    Activation functions keep their inputs and their result, and so do norms that are not one operation. The
    matrices of a tensor block share one copy of their input in autocast's dtype. If inputs are gathered again, they
    are made of the norms' inputs.

    Args:
        module: one pipeline stage on the meta device, recomputation applied, layers as they are written.
        plan: says what a layer is, and which of its modules are cheap.
        regathers: whether tensor blocks gather again what they read.
    """
    recomputed = set(parts_of_recomputed(module))
    functions, norms = [], []
    layers = modules_at(module, (plan.recompute_layer,)).items()
    for path, part in [(f"{at}.{name}", part) for at, layer in layers for name, part in layer.named_modules() if name]:
        if is_recomputed(part):
            continue
        if getattr(part, "product", functional.linear) is not functional.linear:
            part.product = _CastingProduct.apply
        if matches_any(plan.cheap, path):
            has_parameters = any(True for _ in part.parameters())
            if not has_parameters:
                functions.append(path)
            elif regathers and part not in recomputed:
                norms.append(path)
        elif any(matches(pattern.rpartition(".")[0], path) for pattern in plan.norms):
            functions.append(path)
        if matches_any(plan.tensor_blocks, path) and not routes_tokens(path, part, plan):
            part.register_forward_pre_hook(_cast)
    again = replace(plan, recompute={"again": (*functions, *norms)}, cheap=tuple(norms))
    apply_recompute(module, again, granularity="selective", names=("again",))


def _cast(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if not args or not isinstance(args[0], torch.Tensor):
        return args
    return cast_discarded(block, args[0], compute_dtype(args[0])), *args[1:]


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
    first: torch.Tensor,
    arguments: Mapping[str, Any] | None = None,
    *,
    sent: torch.dtype | None = None,
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
        first: token ids int64 [micro_batch, seq] of the first stage; of any other hidden states, in the dtype within
            stages.
        arguments: other ones of its forward, by name.
        sent: dtype of hidden states that are sent between stages; None: as they are.
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
    arguments, within, first = arguments or {}, first.dtype, first.detach()
    if first.is_floating_point():  # hidden states that another rank has sent
        first = first.to(sent or within).requires_grad_()
    gradients_before = [parameter.grad for parameter in parameters]
    live = LiveBytes([first, *arguments.values(), *stage.parameters(), *stage.buffers(), *gradients_before])
    wire, kernels = WireBytes(dimensions or {}), AcceleratorKernels(autocast, views)
    of_masters: list[torch.Tensor] = []

    def taken(parameter: torch.Tensor) -> None:
        """Account for the gradient that a parameter has just received."""
        if gradients == "fresh" and parameter.grad is not None:
            if masters is not None:
                of_masters.append(parameter.grad.to(masters))
            live.retag(parameter.grad if masters is None else of_masters[-1], "gradients")
        if gradients == "sharded" or masters is not None:
            parameter.grad = None

    with ExitStack() as stack:
        for parameter in parameters:
            stack.callback(parameter.register_post_accumulate_grad_hook(taken).remove)  # type: ignore[no-untyped-call]
        for mode in (kernels, live, wire):
            stack.enter_context(mode)
        output = stage(first.to(within), **arguments)
        if loss is None and sent is not None:
            output = output.to(sent)
        kernels.end_forward()
        kept, live.phase = live.total, "workspace"
        outputs = [output] if holds_output else []
        if loss is not None:
            live.retag(output, "logits")
            live.phase = "logits"
            output.register_hook(lambda grad: setattr(live, "phase", "workspace"))
            output = loss(output)
        # By what torch.autograd.backward calls in the end. A function mode would handle that one with itself switched
        # off, and so miss the accelerator's kernels in what is recomputed. The gradient of a stage's output
        # comes from another rank, into a buffer like this one.
        grad = torch.empty_like(output)
        _engine_run_backward((output,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        outputs.clear()
    for parameter in parameters:
        parameter.grad = None
    return MicroBatchTrace(kept=kept, peak=Counter(live.peak), sent=wire.sent)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that were made inside the block and still live, and remembers the peak.

    Storages are counted once however many tensors view them, in the phase in which they were made.
    """

    def __init__(self, known: Iterable[Any]) -> None:
        """``known``: among them, tensors from outside whose storages are counted elsewhere."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: Phase = "activations"
        """Phase under which new storages are counted."""
        self.live: Counter[Phase] = Counter()
        """Bytes now, by the phase in which they were made."""
        self.peak: Counter[Phase] = Counter()
        """Bytes at the moment at which the sum was highest."""
        storages = [local_of(tensor).untyped_storage() for tensor in known if isinstance(tensor, torch.Tensor)]
        self._known = {storage._cdata: storage for storage in storages}  # alive, so that no other has its address
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
        if func.namespace in ("c10d", "_c10d_functional") and func._opname in _SENT:
            position, whole = _SENT[func._opname]
            for value in reversed(args):  # an object in ``c10d``, a name in the functional ones
                if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                    group = dist.ProcessGroup.unbox(value)
                    break
            else:
                group = dist.distributed_c10d._resolve_process_group(args[-1])  # type: ignore[attr-defined]
            size = sum(leaf.nbytes for leaf in tree_leaves(args[position]))
            self.sent[self._dimensions.get(group.group_name, "other")] += round(size * whole(group.size()))
        return func(*args, **(kwargs or {}))


def ring_share(ranks: int) -> float:
    """Return the share of the whole that each of ``ranks`` sends in an all-gather or a reduce-scatter."""
    return (ranks - 1) / ranks


_SENT: Mapping[str, tuple[int, Callable[[int], float]]] = {
    "allreduce_": (0, lambda ranks: 2 * ring_share(ranks)),
    "allreduce_coalesced_": (0, lambda ranks: 2 * ring_share(ranks)),
    "_allgather_base_": (0, ring_share),
    "allgather_": (0, ring_share),
    "allgather_into_tensor_coalesced_": (0, ring_share),
    "_reduce_scatter_base_": (1, ring_share),
    "reduce_scatter_": (1, ring_share),
    "reduce_scatter_tensor_coalesced_": (1, ring_share),
    "alltoall_base_": (1, ring_share),
    "alltoall_": (1, ring_share),
    "broadcast_": (0, ring_share),
    "send": (0, lambda ranks: 1.0),
    "all_reduce": (0, lambda ranks: 2 * ring_share(ranks)),
    "all_gather_into_tensor": (0, lambda ranks: ranks - 1.0),
    "reduce_scatter_tensor": (0, ring_share),
    "all_to_all_single": (0, ring_share),
}
"""Collective → position of its argument that is counted, and the share of it that each of n ranks sends."""
