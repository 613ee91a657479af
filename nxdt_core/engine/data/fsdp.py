"""Data parallelism by FSDP2 over a stage's layers: how far each ZeRO stage lets it shard, and its collectives.

All ZeRO stages use one mechanism. They differ in when gradients are reduced and when gathered weights are freed:

=====  ===================================  ===========================  =====================
stage  gradients are reduce-scattered       weights between steps        optimizer state
=====  ===================================  ===========================  =====================
0      not: one all-reduce per step         whole                        whole
1      once per step, after accumulating    sharded, gathered per step   sharded
2      each micro-batch                     sharded, gathered per step   sharded
3      each micro-batch                     sharded, gathered per layer  sharded
=====  ===================================  ===========================  =====================

With a pipeline, its stages control FSDP2 in the same way (:mod:`nxdt_core.engine.pipeline.stage`). (Rajbhandari et
al. 2020, arXiv:1910.02054.)

Weights of matrix products are sent in the dtype that the products cast them to anyway. Under autocast that is
autocast's dtype. Where a precision policy computes products in one byte per element, it is that, under scaling factors
of whole weights (:func:`scaled_weights`). The largest elements of all shards are found over the ranks in one
all-reduce, once per pass, before the first gather needs them. Products are bitwise those of the weight itself, so
results do not change. Norms, embeddings, routers, biases and weights that an adapter reads, as DoRA does, stay as they
are. :class:`PendingReduceScatters` are for devices whose process groups have no fast reduce-scatter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn

from nxdt_core.distributed.collectives import begin_reduce_scatter
from nxdt_core.distributed.devices import profile_of
from nxdt_core.distributed.placement import is_fsdp_module, local_of
from nxdt_core.distributed.torch_versions import all_gather_single, fsdp_parameter_groups
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.precision import product_layers
from nxdt_core.engine.tensor.layers import VocabParallelEmbedding
from nxdt_core.errors.training import GradientSumsRounded
from nxdt_core.models.moe.experts import SwiGLUExperts
from nxdt_core.models.patterns import modules_at, styled
from nxdt_core.models.quantised import QuantisedWeight
from nxdt_core.models.updates import Update
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.precision import DType, PrecisionPolicy, ScaledCast

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_SCATTERED_IN_FLIGHT = 2
"""Sums that are not waited for; each has two copies of the gradients of a layer."""


_BYTES: Mapping[DType, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

GradientUse = Literal["accumulated", "fresh", "sharded"]
"""Use of a parameter's gradient in backward: added to an existing one, kept as the first one, or handed to a
reduction that leaves the whole one behind."""


_Form = Literal["whole", "narrow", "scaled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStorage:
    """How the ranks of a layout hold weights, gradients and optimizer state, and the bytes of an element of each."""

    sizes: MeshSizes
    policy: PrecisionPolicy
    micro_batches: int
    """Micro-batches of a step, per rank."""
    sharded: bool
    """FSDP2 holds the weights: there are ranks to shard over, or dtypes that differ from the parameters'. Without ZeRO
    it has the second only; masters are then sharded all the same, since whole ones have no advantage."""
    copied: bool
    """Masters have copies that are computed with, and need no FSDP2, since no other rank has the weights of this one.
    Stages of a pipeline add to gradients past the hooks that :mod:`nxdt_core.engine.precision` needs."""
    cast_once: bool
    """A step casts the weights of matrix products to autocast's dtype once, for all micro-batches, where no other rank
    has the weights of this one. One micro-batch has each product cast its weight once anyway."""
    experts_whole: bool
    """Each rank has separate experts, which FSDP2 would gather from that rank alone, as a copy."""

    @classmethod
    def of(cls, sizes: MeshSizes, policy: PrecisionPolicy, *, micro_batches: int = 1) -> WeightStorage:
        """Return how ranks of ``sizes`` hold what ``policy`` says.

        Raises:
            GradientSumsRounded: FSDP2 would round the sums of gradients over micro-batches to the dtype of the shards.
        """
        alone = sizes.dp_replicate == sizes.fsdp == sizes.pp == 1
        mixed = policy.master_weights or policy.gradients != policy.parameters
        copied = alone and policy.master_weights and policy.gradients == "float32"
        if mixed and not policy.master_weights and sizes.zero_stage >= 2 and micro_batches > 1:
            raise GradientSumsRounded(
                precision=policy.name,
                sums=policy.gradients,
                weights=policy.parameters,
                stage=sizes.zero_stage,
                micro_batches=micro_batches,
            )
        return cls(
            sizes=sizes,
            policy=policy,
            micro_batches=micro_batches,
            sharded=not copied and (mixed or (sizes.zero_stage > 0 and sizes.dp_replicate * sizes.fsdp > 1)),
            copied=copied,
            cast_once=alone and not mixed and policy.autocast is not None and micro_batches > 1,
            experts_whole=sizes.ep > 1 and sizes.efsdp == sizes.dp_replicate == 1 and not mixed,
        )

    @property
    def gradient_use(self) -> GradientUse:
        """Return what happens to a micro-batch's gradients."""
        if self.sharded and (self.sizes.zero_stage >= 2 or self.micro_batches == 1):
            return "sharded"
        if self.micro_batches == 1:
            return "fresh"
        return "sharded" if self.copied else "accumulated"  # copies' are added to those of the masters

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
        return _BYTES["float32" if self.policy.master_weights else self.policy.parameters]

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes per element of an accumulated gradient."""
        return _BYTES[self.policy.gradients]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherDtypes:
    """Dtypes in which the weights of a stage are sent; weights that are not named keep the dtype that FSDP2 passes."""

    dtype: torch.dtype
    """Two-byte dtype in which matrix products compute."""
    two_byte: frozenset[str] = frozenset()
    """Names of those that travel in ``dtype``."""
    scaled: frozenset[str] = frozenset()
    """Names of those that travel in one byte per element."""
    cast: ScaledCast | None = None
    """Cast from ``dtype`` to one byte and back; there where ``scaled`` names weights."""


def gather_dtypes(module: nn.Module, plan: ParallelPlan, precision: PrecisionPolicy) -> GatherDtypes:
    """Return how FSDP2 gathers the weights of a stage, the policy's product applied."""
    dtype = getattr(torch, precision.autocast or precision.parameters)
    # Weights that nothing but the product of a precision policy reads, if that product names a cast.
    scaled: dict[str, ScaledCast] = {}
    if all(parameter.requires_grad for parameter in module.parameters()):
        for path, layer, _ in product_layers(module, plan):
            way = getattr(getattr(layer, "product", None), "gathered", None)
            if way is not None and _only_multiplied(layer):
                scaled[f"{path}.weight"] = way
    two_byte = frozenset() if precision.autocast is None else product_weights(module, plan) - scaled.keys()
    casts = [*scaled.values()]
    return GatherDtypes(dtype=dtype, two_byte=two_byte, scaled=frozenset(scaled), cast=casts[0] if casts else None)


def product_weights(module: nn.Module, plan: ParallelPlan) -> frozenset[str]:
    """Return the names of parameters of a stage that nothing but one matrix product reads.

    They are the weights of linear layers that the plan lets tensor parallelism cut, and of experts; none that are
    quantised.
    """
    layers = product_layers(module, plan)
    plain = ((path, layer) for path, layer, _ in layers if not isinstance(local_of(layer.weight), QuantisedWeight))
    weights = {f"{path}.weight" for path, layer in plain if _only_multiplied(layer)}
    for path, part in modules_at(module, plan.experts.modules).items():
        if isinstance(part, SwiGLUExperts) and not part.updates:
            weights |= {f"{path}.{name}" for name in _EXPERTS}
    return frozenset(weights - {name for pair in plan.tied for name in pair})


def _only_multiplied(layer: Any) -> bool:
    """Return whether only the product of a linear layer reads its weight."""
    update: Update | None = getattr(layer, "update", None)
    return update is None or not update.reads_weight


def set_gather_dtypes(sharded: FSDPModule, forms: GatherDtypes, names: dict[int, str]) -> WeightGather | None:
    """Let FSDP2 gather the parameters of ``sharded`` in the dtypes of ``forms``; return None where nothing changes.

    Args:
        sharded: a module after ``fully_shard``.
        forms: dtypes in which the weights of the stage are sent.
        names: of the stage's parameters by ``id``, as they are after sharding.
    """
    groups = fsdp_parameter_groups(sharded._get_fsdp_state()) if forms.two_byte or forms.scaled else ()
    if not groups:  # nothing to change, or a root all of whose parameters are those of its parts
        return None
    (group,) = groups
    if any(p.sharded_param.dtype == forms.dtype for p in group.fsdp_params):  # frozen, and stored as they travel
        return None
    named = [names.get(id(p.sharded_param), "") for p in group.fsdp_params]
    if not (forms.two_byte | forms.scaled).intersection(named):
        return None
    gather = WeightGather(named, [p._sharded_param_data.numel() for p in group.fsdp_params], forms)
    cast(Any, sharded).set_custom_all_gather(gather)
    return gather


class WeightGather:
    """FSDP2's all-gather of a group's parameters, which follow each other in a flat buffer, in mixed dtypes."""

    def __init__(self, names: list[str], sizes: list[int], forms: GatherDtypes) -> None:
        """``names``: of the parameters, in order; ``sizes``: elements of each in the buffer, padding included."""
        self._names, self._sizes, self.forms = names, sizes, forms
        self._narrow = forms.two_byte | forms.scaled
        self.scaled = tuple(name for name in names if name in forms.scaled)
        """Names of the weights that travel in one byte per element while they have scales."""
        self.scales: dict[str, torch.Tensor] = {}
        """Scaling factors of the current weights; a weight without one is sent in its own dtype."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the memory for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather ``input_tensor`` of all ranks into ``output_tensor``."""
        dtype, scales = input_tensor.dtype, self.scales
        # Without a scale, the product casts what arrives to the dtype that it computes in, too.
        otherwise: _Form = "whole" if dtype == self.forms.dtype else "narrow"
        forms: list[_Form] = [
            "scaled" if name in scales else otherwise if name in self._narrow else "whole" for name in self._names
        ]
        if all(form == "whole" for form in forms) or not dtype.is_floating_point:
            work: dist.Work | None = all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
            return work
        parts = torch.split(input_tensor, self._sizes)
        packed = []  # the bytes that are sent of each shard
        for part, name, form in zip(parts, self._names, forms, strict=True):
            sent_part = part if form == "whole" else part.to(self.forms.dtype)
            if form == "scaled":
                assert self.forms.cast is not None
                sent_part = self.forms.cast.narrowed(sent_part, scales[name])
            packed.append(sent_part.view(torch.uint8))
        lengths = [part.numel() for part in packed]
        sent = torch.cat(packed)
        ranks = group.size()
        received = sent.new_empty(ranks * sent.numel())
        work = all_gather_single(received, sent, group=group, async_op=async_op)

        def unpack() -> None:
            of_ranks = torch.split(received.view(ranks, -1), lengths, 1)
            outputs = torch.split(output_tensor.view(ranks, -1), self._sizes, 1)
            for part, whole, name, form in zip(of_ranks, outputs, self._names, forms, strict=True):
                values = part.clone(memory_format=torch.contiguous_format)  # a row for each rank, aligned
                if form == "scaled":
                    assert self.forms.cast is not None
                    whole.copy_(self.forms.cast.widened(values, scales[name], self.forms.dtype))
                else:
                    whole.copy_(values.view(dtype if form == "whole" else self.forms.dtype))

        if work is None:
            unpack()
            return None
        return _Unpacking(work, unpack)


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


@contextmanager
def scaled_weights(
    gathers: Sequence[WeightGather], parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
) -> Iterator[None]:
    """Send weights in one byte per element, under their current scales, within the block. Collective.

    Args:
        gathers: of all stages, in the order that all ranks share.
        parameters: this rank's shards by name.
        group: the ranks that have the other shards; None where this one has all of them.
    """
    scaling = [gather for gather in gathers if gather.scaled]
    if group is None or not scaling or (cast_of := scaling[0].forms.cast) is None:
        yield
        return
    names = list(dict.fromkeys(name for gather in scaling for name in gather.scaled))
    shards = [local_of(parameters[name]).detach() for name in names]
    shards_or_zero = [shard if shard.numel() else shard.new_zeros(1) for shard in shards]
    # Rounding keeps the order of values: the largest rounded value is that of the largest.
    with torch.no_grad():
        maxima = torch.stack(torch._foreach_norm(shards_or_zero, torch.inf)).to(scaling[0].forms.dtype).float()
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        scales = dict(zip(names, cast_of.scales(maxima).unbind(), strict=True))
    for gather in scaling:
        gather.scales = {name: scales[name] for name in gather.scaled}
    try:
        yield
    finally:  # all in two bytes again, since they may change
        for gather in scaling:
            gather.scales = {}


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
        self._sums, self._parameters, self._overlapped = sums, parameters, overlapped

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the memory for gradients or their sums."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, **_: Any
    ) -> None:
        """Sum ``input_tensor`` of all ranks; FSDP2 asks for no other reduction here."""
        # FSDP2 reads a sum at once to add it to an existing gradient, to change its dtype, or for a hook.
        overlapped, dtype = self._overlapped, output_tensor.dtype
        for parameter in self._parameters:
            hooks = getattr(parameter.sharded_param, "_post_accumulate_grad_hooks", None)
            if parameter.sharded_param.grad is not None or parameter.orig_dtype != dtype or hooks:
                overlapped = False
        if overlapped:
            self._sums.begin(output_tensor, input_tensor, group)
        else:
            self._sums.finish()  # what is added to may be one of them
            begin_reduce_scatter(output_tensor, input_tensor, group)()


def outer_modules(module: nn.Module, plan: ParallelPlan) -> tuple[str, tuple[str, ...]]:
    """Return the paths of the modules around the layers of a stage that FSDP2 can gather apart from its root: the
    embedding, or an empty path, and the norm and the head.

    Backward of the embedding reads no weights, so that it is gathered for forward alone. Backward of the norm and the
    head follows their forward, so that they stay gathered in between.

    Those are an embedding that has no update and is not tied to the head, and what the plan's pipeline has behind the
    layers if the head is in it. In other models the root is gathered as a whole before the embedding.
    """
    first, last = "", tuple[str, ...]()
    for path, table in modules_at(module, styled(plan, "vocab_embedding")).items():
        # Backward of an update reads its weights, so that a table with one is part of the root.
        plain = type(table) in (nn.Embedding, VocabParallelEmbedding) and getattr(table, "update", None) is None
        if plain and _shares_no_parameter(module, (path,)):
            first = path
    if plan.pipeline is not None:
        parts = {path: part for path, part in module.named_modules() if path in plan.pipeline.last}
        behind = tuple(
            path for path in plan.pipeline.last if path in parts and any(True for _ in parts[path].parameters())
        )
        heads = modules_at(module, styled(plan, "vocab_head"))
        if any(head in behind for head in heads) and _shares_no_parameter(module, behind):
            last = behind
    return first, last


def _shares_no_parameter(module: nn.Module, paths: tuple[str, ...]) -> bool:
    """Return whether no other module has a parameter of the modules at ``paths``."""
    owners: dict[int, set[bool]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(any(name.startswith(f"{path}.") for path in paths))
    return all(len(inside) == 1 for inside in owners.values())


def apply_data_parallel(
    module: nn.Module,
    plan: ParallelPlan,
    mesh: ParallelMesh,
    precision: PrecisionPolicy,
    experts: Collection[str] = (),
    *,
    compiled: bool = False,
) -> list[WeightGather]:
    """Shard each layer of a stage, its experts over the ranks that hold the same ones, and the remaining modules.

    Args:
        module: one pipeline stage on the meta device, tensor and expert parallelism applied.
        plan: names the layers.
        mesh: its ``fsdp``, ``efsdp`` and ``dp_replicate`` ranks.
        precision: dtypes of computing, accumulating and reducing.
        experts: paths of modules whose parameters are sharded over ``ep``, unless no other rank has the same experts.
        compiled: gather experts together with their layer, which is one graph.

    Returns:
        The gathers that send weights in another dtype than FSDP2 passes to them.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # half a CPU-second, for what is sharded

    # What no backward will read is freed after forward in any case.
    keep = mesh.sizes.zero_stage < 3 and any(parameter.requires_grad for parameter in module.parameters())
    compute, reduce = getattr(torch, precision.parameters), getattr(torch, precision.gradients)
    policy = MixedPrecisionPolicy(
        param_dtype=compute if precision.master_weights else None,
        reduce_dtype=None if reduce == compute else reduce,
        # Among a layer's inputs are the float32 tables of rotary embeddings; in bfloat16 they are 0.4 % off.
        cast_forward_inputs=False,
    )
    layers = modules_at(module, (plan.recompute_layer,))
    forms, gathers = gather_dtypes(module, plan, precision), list[WeightGather]()
    ignored = {parameter for parameter in module.parameters() if isinstance(local_of(parameter), QuantisedWeight)}
    if WeightStorage.of(mesh.sizes, precision).experts_whole:
        ignored |= {parameter for name in experts for parameter in module.get_submodule(name).parameters()}
        experts = ()
    (first, last), dense = outer_modules(module, plan), _mesh(mesh)
    profile = profile_of(torch.device(dense.device_type))
    sums, overlapped = PendingReduceScatters(), mesh.sizes.pp == 1 and mesh.sizes.dp_replicate == 1
    parts: list[tuple[tuple[str, ...], DeviceMesh]] = [((name,), _mesh(mesh, expert=True)) for name in experts]
    parts += [((name,), dense) for name in layers]
    parts += [((first,), dense)] * bool(first) + [(last, dense)] * bool(last) + [(("",), dense)]
    for names, where in parts:
        modules = [module.get_submodule(name) for name in names]
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=where,
            mp_policy=policy,
            reshard_after_forward=not keep and names != last,
            ignored_params=ignored,
        )
        sharded = _sharded(module, names[0])  # the modules of a group share what is set
        sharded.set_gradient_divide_factor(1.0)  # gradients are sums, not means
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that scales
        for group in fsdp_parameter_groups(sharded._get_fsdp_state()) if profile.sums_by_exchange else ():
            group_sum = ReduceScatterByExchange(sums, group.fsdp_params, overlapped=overlapped)
            cast(Any, sharded).set_custom_reduce_scatter(group_sum)
        layer = next((layer for layer in layers if names[0].startswith(f"{layer}.")), None)
        if compiled and layer is not None:
            # FSDP2's hooks of the experts run around their layer. FSDP2 has no public call for that.
            state, around = sharded._get_fsdp_state(), module.get_submodule(layer)
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            state._pre_forward_hook_handle = around.register_forward_pre_hook(
                state._pre_forward, prepend=True, with_kwargs=True
            )
            state._post_forward_hook_handle = around.register_forward_hook(state._post_forward)
        paths = {id(parameter): path for path, parameter in module.named_parameters()}
        if (gather := set_gather_dtypes(sharded, forms, paths)) is not None:
            gathers.append(gather)
    if profile.host:  # which has no streams: without this, a gather that begins early is waited for at once
        _sharded(module, "")._set_unshard_async_op(True)
    if first:
        _sharded(module, first).set_unshard_in_backward(False)
    # The gather of each part starts before the preceding part runs, in forward and backward. By itself FSDP2 does so in
    # backward alone, and there, with several micro-batches, the first part gathers the last one of the micro-batch
    # before.
    order = [*[first] * bool(first), *layers, *last[:1]]
    for before, here, following in zip([None, *order], order, [*order[1:], None], strict=False):
        inner = [name for name in experts if name.startswith(f"{here}.")]
        ahead_of = [_sharded(module, name) for name in (*inner, following) if name is not None]
        _sharded(module, here).set_modules_to_forward_prefetch(ahead_of)
        for name, ahead in pairwise([here, *inner, before or here]):  # itself: it is there already
            _sharded(module, name).set_modules_to_backward_prefetch([_sharded(module, ahead)])
    if order:
        _sharded(module, "").set_modules_to_backward_prefetch([_sharded(module, order[-1])])
    return gathers


def _sharded(module: nn.Module, name: str) -> FSDPModule:
    return cast("FSDPModule", module.get_submodule(name))


def begin_micro_batch(modules: Sequence[nn.Module], mesh: ParallelMesh, *, last: bool) -> None:
    """Set what FSDP2 does with gradients and gathered weights in the next backward."""
    stage = mesh.sizes.zero_stage
    for module in modules:
        if is_fsdp_module(module):
            module.set_is_last_backward(last)
            module.set_requires_gradient_sync(last or stage >= 2)
            module.set_requires_all_reduce(last)
            module.set_reshard_after_backward(last or stage == 3)


@contextmanager
def hooks_off(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run modules on the weights that they have gathered, without FSDP2's hooks, within the block. Those let streams
    wait for each other, which a recording cannot end with."""
    parts = [part for module in modules for part in module.modules() if is_fsdp_module(part)]
    hooks = [each for part in parts for each in (part._forward_pre_hooks, part._forward_hooks)]
    before = [dict(hook) for hook in hooks]
    try:
        for each, all_of in zip(hooks, before, strict=True):
            each.clear()
            each.update({k: h for k, h in all_of.items() if not h.__module__.startswith("torch.distributed.fsdp")})
        yield
    finally:
        for each, all_of in zip(hooks, before, strict=True):
            each.clear()
            each.update(all_of)


def _mesh(mesh: ParallelMesh, *, expert: bool = False) -> DeviceMesh:
    inner = mesh.mesh("efsdp" if expert else "fsdp")
    if mesh.sizes.dp_replicate == 1:
        return inner
    return mesh.mesh("dp_replicate", "efsdp" if expert else "fsdp")
