"""From a builder's plain module to this rank's pipeline stages in their layout, on the meta device.

The order is fixed, since each step acts on what the one before left: adapters, pipeline cut, tensor and sequence,
expert and context parallelism, attention by blocks, products of linear layers, chunked loss, recomputation,
compilation, data parallel sharding. Materialising follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from nxdt_core.config.schema.run import RunConfig
from nxdt_core.devices import HOST, DeviceProfile
from nxdt_core.distributed.placement import piece_of
from nxdt_core.engines.recompute import apply_recompute
from nxdt_core.engines.stages import cut_stage, stages_of_rank
from nxdt_core.engines.weights import allocate, draw_piece
from nxdt_core.errors.layouts import LayoutRefused, ShapesDependOnData
from nxdt_core.nn.attention.blocks import BlockAttention
from nxdt_core.nn.attention.grouped_query import CausalAttention
from nxdt_core.parallel.compile import compile_layers
from nxdt_core.parallel.context.apply import apply_context_parallel
from nxdt_core.parallel.data import apply_data_parallel, needs_sharding
from nxdt_core.parallel.dropout import salt_dropouts
from nxdt_core.parallel.expert.apply import apply_expert_parallel, expert_modules
from nxdt_core.parallel.expert.dispatch import Sliced
from nxdt_core.parallel.expert.figures import routers_of
from nxdt_core.parallel.expert.shuffle import apply_token_shuffle
from nxdt_core.parallel.loss.chunked import chunk_loss
from nxdt_core.parallel.mesh import Dimension, ParallelMesh
from nxdt_core.parallel.products import apply_product
from nxdt_core.parallel.tensor.apply import apply_tensor_parallel, partial_parameters, replicated_partials
from nxdt_core.parallel.tensor.padding import PaddedDim, padded_parameters, real_part
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.initialisation import InitRule
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.parallel.pipeline_schedules import check_whole_backward
from nxdt_core.protocols.plan import ParallelPlan
from nxdt_core.protocols.precision import PrecisionPolicy

__all__ = ["LayoutOptions", "Stages", "block_attention", "lay_out", "materialise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """What a run's configuration says of its layout in addition to the sizes of the mesh."""

    device_type: str = HOST.type
    sequence_parallel: bool = False
    pad_heads: bool = False
    context_parallel_method: Literal["ring", "gather"] = "ring"
    sliced_tokens: Sliced = "none"
    """What each tensor parallel rank sends a slice of to experts, and not the whole."""
    token_shuffle: int = 1
    """Data parallel ranks that exchange tokens before experts."""
    pipeline_cuts: tuple[str, ...] | None = None
    recompute_granularity: Literal["selective", "full"] | None = None
    recompute_names: tuple[str, ...] = ()
    loss_chunk_tokens: int | None = None
    compile_backend: str | None = None
    """None: run as it is written."""
    static_shapes: bool = False
    """Compile again for each shape."""
    block_attention: BlockAttention | None = None
    """How to attend to packed documents by blocks; None: under a mask."""

    @classmethod
    def of(cls, run: RunConfig, profile: DeviceProfile, mesh: ParallelMesh) -> LayoutOptions:
        """Return the options of a configuration for a device type."""
        return cls(
            device_type=profile.device_type,
            sequence_parallel=run.distributed_strategy.sequence_parallel and mesh.sizes.tp > 1,
            pad_heads=run.distributed_strategy.pad_heads,
            context_parallel_method=run.context_parallel_method or profile.context_parallel_method,
            sliced_tokens=_sliced_tokens(run, mesh),
            token_shuffle=run.distributed_strategy.token_shuffle_group_size,
            pipeline_cuts=run.model.pipeline_cuts,
            recompute_granularity=run.model.activations_checkpoint_granularity,
            recompute_names=run.model.activations_checkpoint_recompute or (),
            loss_chunk_tokens=run.model.loss_chunk_tokens,
            compile_backend=profile.compile_backend if run.model.compile else None,
            static_shapes=profile.static_shapes,
            block_attention=block_attention(profile),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """This rank's pipeline stages; one, the whole model, without a pipeline."""

    modules: tuple[nn.Module, ...]
    numbers: tuple[int, ...]
    """Number of each stage in the whole pipeline."""
    plan: ParallelPlan
    """With what adapters changed."""
    rules: tuple[InitRule, ...]
    added: frozenset[str]
    """Parameters of the whole model that adapters added."""
    tensor_partial: frozenset[str]
    """Parameters whose gradient is a partial sum on each tensor parallel rank."""
    replica_partial: frozenset[str]
    """Parameters of heads that several tensor parallel ranks hold; each sees the gradient of its own queries."""
    padded: Mapping[str, PaddedDim]
    """Parameters with heads of zeros, which no checkpoint sees."""
    sharded: bool
    """Whether FSDP2 holds the parameters."""
    sequence_parallel: bool
    """Whether hidden states between layers are parts of the sequence."""
    compiled: bool
    """Whether layers are compiled."""
    routers: Mapping[str, int]
    """Number of experts by router of the whole model, those of other stages included."""


def lay_out(
    builder: ModelBuilder,
    mesh: ParallelMesh,
    options: LayoutOptions,
    precision: PrecisionPolicy,
    adapters: Sequence[Adapter] = (),
) -> Stages:
    """Build this rank's stages on the meta device; no process but this one is asked.

    Raises:
        NxdtError: the model's plan does not allow the layout.
    """
    recompute, compiled = options.recompute_granularity is not None, options.compile_backend is not None
    check_whole_backward(mesh.sizes.schedule, recompute=recompute, compiled=compiled)
    with torch.device("meta"):
        whole = builder.build()
        plan, rules = builder.plan(), list(builder.init_rules())
        base = _names(whole)
        for adapter in adapters:
            plan = adapter.apply(whole, plan)
            rules = [*adapter.init_rules(), *rules]
    _check_refused(whole, plan, mesh)
    if options.static_shapes:
        _check_static(whole, plan)
    _set_dtypes(whole, precision)
    numbers = stages_of_rank(mesh.rank("pp"), mesh.sizes.pp, mesh.sizes.vpp, mesh.sizes.schedule)
    modules = tuple(_cut(whole, plan, mesh, number, options.pipeline_cuts) for number in numbers)
    tensor_partial: set[str] = set()
    padded: dict[str, PaddedDim] = {}
    replica_partial: set[str] = set()
    for module in modules:
        if mesh.sizes.tp > 1:
            apply_tensor_parallel(
                module, plan, mesh, sequence_parallel=options.sequence_parallel, pad_heads=options.pad_heads
            )
        apply_expert_parallel(
            module, plan, mesh, sequence_parallel=options.sequence_parallel, sliced=options.sliced_tokens
        )
        apply_token_shuffle(module, plan, mesh, ranks=options.token_shuffle)
        if mesh.sizes.tp > 1:  # asked once experts are cut: what tensor parallelism shards is no partial sum
            tensor_partial |= partial_parameters(module, plan, sequence_parallel=options.sequence_parallel)
            replica_partial |= replicated_partials(module)
            padded |= padded_parameters(module)
        salt_dropouts(module, plan, mesh, sequence_parallel=options.sequence_parallel)
        _apply_rest(module, plan, mesh, options, precision)
    return Stages(
        modules=modules,
        numbers=numbers,
        plan=plan,
        rules=tuple(rules),
        added=_names(whole) - base,
        tensor_partial=frozenset(tensor_partial),
        replica_partial=frozenset(replica_partial),
        padded=padded,
        sharded=needs_sharding(mesh, precision),
        sequence_parallel=options.sequence_parallel,
        compiled=compiled,
        routers=routers_of(whole, plan),
    )


def _sliced_tokens(run: RunConfig, mesh: ParallelMesh) -> Sliced:
    if mesh.sizes.tp * mesh.sizes.ep <= run.trainer.devices:  # neighbours in ep are tp ranks apart
        return "none"
    return "capacity" if run.model.compile else "all"


def block_attention(profile: DeviceProfile) -> BlockAttention | None:
    """Return how a device type attends to packed documents by blocks; None where it does so under a mask."""
    dtypes = frozenset(getattr(torch, name) for name in profile.block_attention)
    return BlockAttention(dtypes, backend=profile.compile_backend) if dtypes else None


def _names(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in module.named_parameters(remove_duplicate=False))


def _set_dtypes(whole: nn.Module, precision: PrecisionPolicy) -> None:
    """Masters are what is stored of trained parameters; a frozen one is stored as it is computed with."""
    compute = getattr(torch, precision.parameters)
    whole.to(torch.float32 if precision.master_weights else compute)
    for parameter in whole.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(compute)


def _check_refused(whole: nn.Module, plan: ParallelPlan, mesh: ParallelMesh) -> None:
    dimensions: tuple[Dimension, ...] = ("tp", "pp", "ep", "cp")
    for dimension in dimensions:
        if mesh.size(dimension) > 1 and dimension in plan.refused:
            reason, model = plan.refused[dimension], type(whole).__name__
            raise LayoutRefused(model=model, dimension=dimension, size=mesh.size(dimension), reason=reason)


def _check_static(whole: nn.Module, plan: ParallelPlan) -> None:
    """Refuse routers that give their experts as many tokens as choose them."""
    for path, experts in routers_of(whole, plan).items():
        router: Any = whole.get_submodule(path)
        if getattr(router, "capacity_factor", 0) is None:
            raise ShapesDependOnData(path=path, experts=experts, top_k=int(router.top_k))


def _cut(
    whole: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, number: int, cuts: tuple[str, ...] | None
) -> nn.Module:
    if mesh.sizes.stages == 1:
        return whole
    return cut_stage(whole, plan, stage=number, stages=mesh.sizes.stages, cuts=cuts)


def _apply_rest(
    module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, options: LayoutOptions, precision: PrecisionPolicy
) -> None:
    if mesh.sizes.cp > 1:
        apply_context_parallel(module, plan, mesh, method=options.context_parallel_method)
    if options.block_attention is not None:
        for part in module.modules():
            if isinstance(part, CausalAttention):
                part.blocks = options.block_attention
    if precision.linear_product is not None:
        apply_product(module, plan, precision.linear_product(options.device_type))
    if options.loss_chunk_tokens is not None:
        chunk_loss(module, plan, tokens=options.loss_chunk_tokens)
    apply_recompute(module, plan, granularity=options.recompute_granularity, names=options.recompute_names)
    if options.compile_backend is not None:
        compile_layers(module, plan, backend=options.compile_backend, static_shapes=options.static_shapes)
    if needs_sharding(mesh, precision):
        experts = expert_modules(module, plan) if mesh.sizes.ep > 1 else ()
        compiled = options.compile_backend is not None
        apply_data_parallel(module, plan, mesh, precision, experts, compiled=compiled)


def materialise(stages: Stages, device: torch.device, *, seed: int, base: bool = True) -> None:
    """Give the stages memory on ``device`` and draw their weights; without ``base`` only those that adapters added,
    the others are left undefined for a load.

    Every rank draws its own shards alone, bit-equal to those elements of the whole.
    """
    for module in stages.modules:
        allocate(module, device, tied=stages.plan.tied)
        _draw(module, stages, seed, base=base)


@torch.no_grad()
def _draw(module: nn.Module, stages: Stages, seed: int, *, base: bool) -> None:
    owners = {user: owner for owner, user in stages.plan.tied}
    for name, parameter in module.named_parameters():
        if not base and name not in stages.added:
            continue
        name = owners.get(name, name)  # a stage that has the user of a tied pair alone draws the owner's elements
        piece = piece_of(parameter)
        if name in stages.padded:
            piece.tensor.zero_()
            piece = real_part(parameter, stages.padded[name])
        draw_piece(piece, name, stages.rules, seed=seed)
