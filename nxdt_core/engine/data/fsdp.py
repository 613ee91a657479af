"""Data parallelism: FSDP2 over a stage's layers, and how far each ZeRO stage lets it shard.

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
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from nxdt_core.distributed.devices import profile_of
from nxdt_core.distributed.placement import is_fsdp_module, local_of
from nxdt_core.distributed.torch_versions import fsdp_parameter_groups
from nxdt_core.engine.data.collectives import (
    PendingReduceScatters,
    ReduceScatterByExchange,
    WeightGather,
    gather_dtypes,
    set_gather_dtypes,
)
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.tensor.layers import VocabParallelEmbedding
from nxdt_core.errors.optimizers import GradientSumsRounded
from nxdt_core.models.patterns import matches, matches_any
from nxdt_core.models.quantised import QuantisedWeight
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import ParallelPlan, TensorStyle
from nxdt_core.protocols.precision import PrecisionPolicy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


def needs_sharding(mesh: ParallelMesh, precision: PrecisionPolicy) -> bool:
    """Return whether FSDP2 has something to do: ranks to shard over, or dtypes that differ from the parameters'.

    Without ZeRO it has the second only; masters are then sharded all the same, since whole ones have no advantage.
    """
    if uses_copied_masters(mesh.sizes, precision):
        return False
    mixed = precision.master_weights or precision.gradients != precision.parameters
    return mixed or (mesh.sizes.zero_stage > 0 and mesh.sizes.dp_replicate * mesh.sizes.fsdp > 1)


def uses_copied_masters(sizes: MeshSizes, precision: PrecisionPolicy) -> bool:
    """Return whether no other rank has the weights of this one, so that their masters need no FSDP2.

    Stages of a pipeline add to gradients past the hooks that :mod:`nxdt_core.engine.precision` needs.
    """
    alone = sizes.dp_replicate == sizes.fsdp == sizes.pp == 1
    return alone and precision.master_weights and precision.gradients == "float32"


def leaves_experts_whole(sizes: MeshSizes, precision: PrecisionPolicy) -> bool:
    """Return whether each rank has separate experts, which FSDP2 would gather from that rank alone, as a copy."""
    mixed = precision.master_weights or precision.gradients != precision.parameters
    return sizes.ep > 1 and sizes.efsdp == sizes.dp_replicate == 1 and not mixed


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterModules:
    """Modules around the layers of a stage that FSDP2 gathers separately: their paths, empty where they are part of the
    root."""

    first: str = ""
    """The embedding. Its backward reads no weights, so that it is gathered for forward alone."""
    last: tuple[str, ...] = ()
    """The norm and the head. Their backward follows their forward, so that they stay gathered in between."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the paths of all modules."""
        return (self.first, *self.last) if self.first else self.last


def outer_modules(module: nn.Module, plan: ParallelPlan) -> OuterModules:
    """Return the modules around the layers of a stage that can be gathered apart from its root.

    Those are an embedding that has no update and is not tied to the head, and what the plan's pipeline has behind the
    layers if the head is in it. In other models the root is gathered as a whole before the embedding.
    """
    first, last = "", tuple[str, ...]()
    for path in _styled(module, plan, "vocab_embedding"):
        table = module.get_submodule(path)
        # Backward of an update reads its weights, so that a table with one is part of the root.
        plain = type(table) in (nn.Embedding, VocabParallelEmbedding) and getattr(table, "update", None) is None
        if plain and _shares_no_parameter(module, (path,)):
            first = path
    if plan.pipeline is not None:
        parts = {path: part for path, part in module.named_modules() if path in plan.pipeline.last}
        behind = tuple(
            path for path in plan.pipeline.last if path in parts and any(True for _ in parts[path].parameters())
        )
        heads = _styled(module, plan, "vocab_head")
        if any(head in behind for head in heads) and _shares_no_parameter(module, behind):
            last = behind
    return OuterModules(first=first, last=last)


def _styled(module: nn.Module, plan: ParallelPlan, wanted: TensorStyle) -> list[str]:
    """Paths of the modules with parameters that ``plan`` gives a style."""
    patterns = tuple(pattern for pattern, style in plan.tensor.items() if style == wanted)
    matching = [(path, part) for path, part in module.named_modules() if matches_any(patterns, path)]
    return [path for path, part in matching if any(True for _ in part.parameters())]


def _shares_no_parameter(module: nn.Module, paths: tuple[str, ...]) -> bool:
    """Return whether no other module has a parameter of the modules at ``paths``."""
    owners: dict[int, set[bool]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(any(name.startswith(f"{path}.") for path in paths))
    return all(len(inside) == 1 for inside in owners.values())


def check_gradient_dtype(sizes: MeshSizes, precision: PrecisionPolicy, *, micro_batches: int) -> None:
    """Check that FSDP2 does not round the sums of gradients over micro-batches to the dtype of the shards.

    Raises:
        GradientSumsRounded: it would.
    """
    narrow = not precision.master_weights and precision.gradients != precision.parameters
    if narrow and sizes.zero_stage >= 2 and micro_batches > 1:
        raise GradientSumsRounded(
            precision=precision.name,
            sums=precision.gradients,
            weights=precision.parameters,
            stage=sizes.zero_stage,
            micro_batches=micro_batches,
        )


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
    layers = [name for name, _ in module.named_modules() if matches(plan.recompute_layer, name)]
    forms, gathers = gather_dtypes(module, plan, precision), list[WeightGather]()
    ignored = {parameter for parameter in module.parameters() if isinstance(local_of(parameter), QuantisedWeight)}
    if leaves_experts_whole(mesh.sizes, precision):
        ignored |= {parameter for name in experts for parameter in module.get_submodule(name).parameters()}
        experts = ()
    outer, dense = outer_modules(module, plan), _mesh(mesh)
    profile = profile_of(torch.device(dense.device_type))
    sums, overlapped = PendingReduceScatters(), mesh.sizes.pp == 1 and mesh.sizes.dp_replicate == 1
    parts = [((name,), _mesh(mesh, expert=True)) for name in experts] + [((name,), dense) for name in layers]
    parts += [((outer.first,), dense)] * bool(outer.first) + [(outer.last, dense)] * bool(outer.last) + [(("",), dense)]
    for names, where in parts:
        modules = [module.get_submodule(name) for name in names]
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=where,
            mp_policy=policy,
            reshard_after_forward=not keep and names != outer.last,
            ignored_params=ignored,
        )
        sharded = _sharded(module, names[0])  # the modules of a group share what is set
        _set_reduction(sharded, sums if profile.sums_by_exchange else None, overlapped=overlapped)
        layer = next((layer for layer in layers if names[0].startswith(f"{layer}.")), None)
        if compiled and layer is not None:
            _move_hooks(sharded, module.get_submodule(layer))
        paths = {id(parameter): path for path, parameter in module.named_parameters()}
        if (gather := set_gather_dtypes(sharded, forms, paths)) is not None:
            gathers.append(gather)
    if profile.host:  # which has no streams: without this, a gather that begins early is waited for at once
        _sharded(module, "")._set_unshard_async_op(True)
    if outer.first:
        _sharded(module, outer.first).set_unshard_in_backward(False)
    _prefetch(module, outer, layers, experts)
    return gathers


def _set_reduction(sharded: FSDPModule, sums: PendingReduceScatters | None, *, overlapped: bool) -> None:
    """Let FSDP2 sum gradients, not average them; through ``sums`` on devices that sum by exchange."""
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that scales
    if sums is None:
        return
    for group in fsdp_parameter_groups(sharded._get_fsdp_state()):
        group_sum = ReduceScatterByExchange(sums, group.fsdp_params, overlapped=overlapped)
        cast(Any, sharded).set_custom_reduce_scatter(group_sum)


def _prefetch(module: nn.Module, outer: OuterModules, layers: Sequence[str], experts: Collection[str]) -> None:
    """Start the gather of each part before the preceding part runs, in forward and backward.

    By itself FSDP2 does so in backward alone, and there, with several micro-batches, the first part gathers the last
    one of the micro-batch before.
    """
    order = [outer.first] * bool(outer.first) + list(layers) + list(outer.last[:1])
    within = {name: [inner for inner in experts if inner.startswith(f"{name}.")] for name in order}
    for before, here, following in zip([None, *order], order, [*order[1:], None], strict=False):
        inner = within[here]
        _sharded(module, here).set_modules_to_forward_prefetch(_states(module, [*inner, following]))
        for name, ahead in pairwise([here, *inner, before or here]):  # itself: it is there already
            _sharded(module, name).set_modules_to_backward_prefetch(_states(module, [ahead]))
    if order:
        _sharded(module, "").set_modules_to_backward_prefetch(_states(module, order[-1:]))


def _states(module: nn.Module, names: Iterable[str | None]) -> list[FSDPModule]:
    return [_sharded(module, name) for name in names if name is not None]


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


def _move_hooks(inner: FSDPModule, layer: nn.Module) -> None:
    """Run FSDP2's hooks of ``inner`` around ``layer`` instead. FSDP2 has no public call for that."""
    state = inner._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = layer.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
    state._post_forward_hook_handle = layer.register_forward_hook(state._post_forward)


def _mesh(mesh: ParallelMesh, *, expert: bool = False) -> DeviceMesh:
    inner = mesh.mesh("efsdp" if expert else "fsdp")
    if mesh.sizes.dp_replicate == 1:
        return inner
    return mesh.mesh("dp_replicate", "efsdp" if expert else "fsdp")
