"""Collectives that replace FSDP2's own: gathers of weights in fewer bytes, and sums of gradients by exchange.

Weights of matrix products are sent in the dtype that the products cast them to anyway. Under autocast that is
autocast's dtype. Where a precision policy computes products in one byte per element, it is that, under scaling factors
of whole weights (:class:`ScaledWeights`). The largest elements of all shards are found over the ranks in one
all-reduce, once per pass, before the first gather needs them. Products are bitwise those of the weight itself, so
results do not change. Norms, embeddings, routers, biases and weights that an adapter reads, as DoRA does, stay as they
are.

:class:`PendingReduceScatters` are for devices whose process groups have no fast reduce-scatter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn

from nxdt_core.distributed.collectives import begin_reduce_scatter
from nxdt_core.distributed.placement import local_of
from nxdt_core.distributed.torch_versions import all_gather_single, fsdp_parameter_groups
from nxdt_core.engine.precision import product_layers
from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.patterns import matches_any
from nxdt_core.models.quantised import QuantisedWeight
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.precision import PrecisionPolicy, ScaledCast

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_SCATTERED_IN_FLIGHT = 2
"""Sums that are not waited for; each has two copies of the gradients of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherDtypes:
    """Dtypes in which the weights of a stage are sent; weights that are not named keep the dtype that FSDP2 passes."""

    dtype: torch.dtype
    """Two-byte dtype in which matrix products compute."""
    narrow: frozenset[str] = frozenset()
    """Names of those that travel in ``dtype``."""
    scaled: frozenset[str] = frozenset()
    """Names of those that travel in one byte per element."""
    cast: ScaledCast | None = None
    """Cast from ``dtype`` to one byte and back; there where ``scaled`` names weights."""


def gather_dtypes(module: nn.Module, plan: ParallelPlan, precision: PrecisionPolicy) -> GatherDtypes:
    """Return how FSDP2 gathers the weights of a stage, the policy's product applied."""
    dtype = getattr(torch, precision.autocast or precision.parameters)
    scaled = scaled_weights(module, plan)
    if not all(parameter.requires_grad for parameter in module.parameters()):
        scaled = {}
    narrow = frozenset() if precision.autocast is None else product_weights(module, plan) - scaled.keys()
    casts = [*scaled.values()]
    return GatherDtypes(dtype=dtype, narrow=narrow, scaled=frozenset(scaled), cast=casts[0] if casts else None)


def product_weights(module: nn.Module, plan: ParallelPlan) -> frozenset[str]:
    """Return the names of parameters of a stage that nothing but one matrix product reads.

    They are the weights of linear layers that the plan lets tensor parallelism cut, and of experts; none that are
    quantised.
    """
    layers = product_layers(module, plan)
    plain = ((path, layer) for path, layer, _ in layers if not isinstance(local_of(layer.weight), QuantisedWeight))
    weights = {f"{path}.weight" for path, layer in plain if _only_multiplied(layer)}
    for path, part in module.named_modules():
        if isinstance(part, SwiGLUExperts) and matches_any(plan.experts.modules, path) and not part.updates:
            weights |= {f"{path}.{name}" for name in _EXPERTS}
    return frozenset(weights - {name for pair in plan.tied for name in pair})


def scaled_weights(module: nn.Module, plan: ParallelPlan) -> dict[str, ScaledCast]:
    """Return the parameters of a stage that can travel in one byte per element, by name, with their casts.

    They are the weights that nothing but the product of a precision policy reads, if that product names a cast.
    """
    casts: dict[str, ScaledCast] = {}
    for path, layer, _ in product_layers(module, plan):
        way = getattr(getattr(layer, "product", None), "gathered", None)
        if way is not None and _only_multiplied(layer):
            casts[f"{path}.weight"] = way
    return casts


def _only_multiplied(layer: Any) -> bool:
    """Return whether only the product of a linear layer reads its weight."""
    update = getattr(layer, "update", None)
    return update is None or not getattr(update, "reads_weight", True)


def set_gather_dtypes(sharded: FSDPModule, forms: GatherDtypes, names: dict[int, str]) -> WeightGather | None:
    """Let FSDP2 gather the parameters of ``sharded`` in the dtypes of ``forms``; return None where nothing changes.

    Args:
        sharded: a module after ``fully_shard``.
        forms: dtypes in which the weights of the stage are sent.
        names: of the stage's parameters by ``id``, as they are after sharding.
    """
    groups = fsdp_parameter_groups(sharded._get_fsdp_state()) if forms.narrow or forms.scaled else ()
    if not groups:  # nothing to change, or a root all of whose parameters are those of its parts
        return None
    (group,) = groups
    if any(p.sharded_param.dtype == forms.dtype for p in group.fsdp_params):  # frozen, and stored as they travel
        return None
    sizes = [(p._sharded_param_data.numel(), names.get(id(p.sharded_param), "")) for p in group.fsdp_params]
    segments = [_Segment(size, name, _form(name, forms)) for size, name in sizes]
    if all(segment.form == "whole" for segment in segments):
        return None
    gather = WeightGather(segments, forms)
    cast(Any, sharded).set_custom_all_gather(gather)
    return gather


_Form = Literal["whole", "narrow", "scaled"]


def _form(name: str, forms: GatherDtypes) -> _Form:
    if name in forms.scaled:
        return "scaled"
    return "narrow" if name in forms.narrow else "whole"


@dataclass(frozen=True, slots=True)
class _Segment:
    """A parameter's shard in the flat buffer of its group."""

    size: int
    """Elements, those that pad it included."""
    name: str
    form: _Form


class WeightGather:
    """FSDP2's all-gather of a group's parameters, which follow each other in a flat buffer, in mixed dtypes."""

    def __init__(self, segments: list[_Segment], forms: GatherDtypes) -> None:
        self._segments = segments
        self.forms = forms
        self._scales: dict[str, torch.Tensor] = {}

    @property
    def scaled(self) -> tuple[str, ...]:
        """Names of the weights that travel in one byte per element while they have scales."""
        return tuple(segment.name for segment in self._segments if segment.form == "scaled")

    def set_scales(self, scales: dict[str, torch.Tensor]) -> None:
        """Set the scaling factors of the current weights; a weight without one is sent in its own dtype."""
        self._scales = scales

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the memory for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather ``input_tensor`` of all ranks into ``output_tensor``."""
        dtype, scales = input_tensor.dtype, self._scales
        forms = [self._current_form(segment, dtype, scales) for segment in self._segments]
        if all(form == "whole" for form in forms) or not dtype.is_floating_point:
            work: dist.Work | None = all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
            return work
        sizes = [segment.size for segment in self._segments]
        parts = torch.split(input_tensor, sizes)
        packed = [self._packed(*arguments, scales) for arguments in zip(parts, self._segments, forms, strict=True)]
        lengths = [part.numel() for part in packed]
        sent = torch.cat(packed)
        ranks = group.size()
        received = sent.new_empty(ranks * sent.numel())
        work = all_gather_single(received, sent, group=group, async_op=async_op)

        def unpack() -> None:
            of_ranks = torch.split(received.view(ranks, -1), lengths, 1)
            outputs = torch.split(output_tensor.view(ranks, -1), sizes, 1)
            for part, whole, segment, form in zip(of_ranks, outputs, self._segments, forms, strict=True):
                whole.copy_(self._unpacked(part, segment, form, dtype, scales))

        if work is None:
            unpack()
            return None
        return _Unpacking(work, unpack)

    def _current_form(self, segment: _Segment, dtype: torch.dtype, scales: dict[str, torch.Tensor]) -> _Form:
        if segment.form == "scaled" and segment.name in scales:
            return "scaled"
        # Without a scale, the product casts what arrives to the dtype that it computes in, too.
        return "whole" if segment.form == "whole" or dtype == self.forms.dtype else "narrow"

    def _packed(
        self, part: torch.Tensor, segment: _Segment, form: _Form, scales: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the bytes that are sent of a shard."""
        if form == "whole":
            return part.view(torch.uint8)
        rounded = part.to(self.forms.dtype)
        if form == "scaled":
            assert self.forms.cast is not None
            rounded = self.forms.cast.narrowed(rounded, scales[segment.name])
        return rounded.view(torch.uint8)

    def _unpacked(
        self, part: torch.Tensor, segment: _Segment, form: _Form, dtype: torch.dtype, scales: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the values of :meth:`_packed`, a row for each rank."""
        aligned = part.clone(memory_format=torch.contiguous_format)
        if form != "scaled":
            return aligned.view(dtype if form == "whole" else self.forms.dtype)
        assert self.forms.cast is not None
        return self.forms.cast.widened(aligned, scales[segment.name], self.forms.dtype)


class _Unpacking(dist.Work):
    """The gather and then its unpacking, as one piece of work to wait for."""

    def __init__(self, work: dist.Work, unpack: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._unpack = work, unpack

    def wait(self, *arguments: Any) -> bool:
        """Wait until the output is whole."""
        done = self._work.wait(*arguments)
        self._unpack()
        return done


class ScaledWeights:
    """The weights of a rank's stages that are sent in one byte per element while a pass runs."""

    def __init__(
        self,
        gathers: Sequence[WeightGather],
        parameters: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup | None,
    ) -> None:
        """
        Args:
            gathers: of all stages, in the order that all ranks share.
            parameters: this rank's shards by name.
            group: the ranks that have the other shards; None where this one has all of them.
        """
        self._gathers = [gather for gather in gathers if gather.scaled] if group is not None else []
        self._forms = self._gathers[0].forms if self._gathers else None
        self._weights = {name: parameters[name] for gather in self._gathers for name in gather.scaled}
        self._group = group

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Send the weights under their current scales within the block. Collective."""
        self.update()
        try:
            yield
        finally:
            self.forget()

    @torch.no_grad()
    def update(self) -> None:
        """Compute the scales of the weights as they are now. Collective."""
        if self._forms is None or self._forms.cast is None:
            return
        shards = [local_of(weight).detach() for weight in self._weights.values()]
        shards_or_zero = [shard if shard.numel() else shard.new_zeros(1) for shard in shards]
        # Rounding keeps the order of values: the largest rounded value is that of the largest.
        maxima = torch.stack(torch._foreach_norm(shards_or_zero, torch.inf)).to(self._forms.dtype).float()
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self._group)
        scales = dict(zip(self._weights, self._forms.cast.scales(maxima).unbind(), strict=True))
        for gather in self._gathers:
            gather.set_scales({name: scales[name] for name in gather.scaled})

    def forget(self) -> None:
        """Send all weights in two bytes again, since they may change."""
        for gather in self._gathers:
            gather.set_scales({})


class PendingReduceScatters:
    """Reduce-scatters that FSDP2's groups have started in the running backward; all are finished when it ends."""

    def __init__(self) -> None:
        self._running: deque[Callable[[], None]] = deque()

    def begin(self, part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Start to write this rank's part of the sum of the ranks' ``whole`` to ``part``, which is done when backward
        ends."""
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        while len(self._running) >= _SCATTERED_IN_FLIGHT:
            self._running.popleft()()
        self._running.append(begin_reduce_scatter(part, whole, group))

    def finish(self) -> None:
        """Wait until all sums are there."""
        while self._running:
            self._running.popleft()()


class ReduceScatterByExchange:
    """FSDP2's reduce-scatter of one group's gradients, by an all-to-all and a local sum."""

    def __init__(self, sums: PendingReduceScatters, parameters: Sequence[Any], *, overlapped: bool) -> None:
        """
        Args:
            sums: all that are running, shared by the groups of a model.
            parameters: FSDP2's, of the group.
            overlapped: whether backward may continue before a sum is there, if nothing reads it before.
        """
        self._sums = sums
        self._parameters = parameters
        self._overlapped = overlapped

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the memory for gradients or their sums."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, **_: Any
    ) -> None:
        """Sum ``input_tensor`` of all ranks; FSDP2 asks for no other reduction here."""
        if self._overlapped and not any(_reads(p, output_tensor.dtype) for p in self._parameters):
            self._sums.begin(output_tensor, input_tensor, group)
        else:
            self._sums.finish()  # what is added to may be one of them
            begin_reduce_scatter(output_tensor, input_tensor, group)()


def _reads(parameter: Any, dtype: torch.dtype) -> bool:
    """Return whether FSDP2 reads the sum of a parameter's gradient at once: to add it to an existing gradient, to
    change its dtype, or for a hook."""
    sharded = parameter.sharded_param
    hooks = getattr(sharded, "_post_accumulate_grad_hooks", None)
    return sharded.grad is not None or parameter.orig_dtype != dtype or bool(hooks)
