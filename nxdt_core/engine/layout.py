"""The layout of a model: a builder's plain module becomes this rank's pipeline stages, on the meta device.

The order is fixed, since each step acts on what the one before left: adapters, pipeline cut, tensor and sequence,
expert and context parallelism, attention by blocks, products of linear layers, chunked loss, recomputation,
compilation, data parallel sharding. Materialising follows.

Dropout: ranks that hold the same values drop the same elements, and no others do. Tensor parallel ranks hold the same
hidden states outside the tensor blocks. Inside the blocks, and everywhere under sequence parallelism, each rank has
different values. Data and context parallel ranks never hold the same tokens, and two modules never drop the same
elements. Masks of hidden states and of experts' rows are drawn by position, and each rank takes its part of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, Literal

import torch
from torch import nn

from nxdt_core.config.schema import RunConfig
from nxdt_core.distributed.devices import CPU, DeviceProfile
from nxdt_core.distributed.placement import local_shard_of
from nxdt_core.engine.compile import compile_layers, pipeline_collectives
from nxdt_core.engine.context.attention import apply_context_parallel
from nxdt_core.engine.context.blocks import zigzag_runs
from nxdt_core.engine.data.fsdp import WeightGather, WeightStorage, apply_data_parallel
from nxdt_core.engine.expert import (
    Sliced,
    apply_expert_parallel,
    apply_token_shuffle,
    exchange_chunks,
    routers_of,
)
from nxdt_core.engine.loss import chunk_loss, compiled_rows
from nxdt_core.engine.mesh import Dimension, ParallelMesh
from nxdt_core.engine.pipeline.schedules import (
    PartCosts,
    choose_cuts,
    micro_batches_fit,
)
from nxdt_core.engine.pipeline.split import cut_stage, ties_ends
from nxdt_core.engine.precision import apply_product, frozen_layers, quantise_frozen
from nxdt_core.engine.recompute import apply_recompute, discard_in_layers, parts_of_recomputed
from nxdt_core.engine.tensor.apply import apply_tensor_parallel, partial_parameters
from nxdt_core.engine.tensor.layers import BlockEntry, PaddedDim, padded_parameters, unpadded_shard
from nxdt_core.engine.weights import allocate, build_whole, draw_local_shard, set_dtypes
from nxdt_core.errors.layouts import (
    BaseNotQuantised,
    ExchangeInOnePart,
    LayoutRefused,
    NoSymmetricMemory,
    ShapesDependOnData,
    ZeroBubbleCannot,
)
from nxdt_core.models.attention.documents import BlockAttention
from nxdt_core.models.attention.grouped_query import AttentionSemantics, CausalAttention
from nxdt_core.models.loss import IN_CHUNKS, RowKernels
from nxdt_core.models.moe.dispatch import LocalDispatcher
from nxdt_core.models.patterns import matches_any, matches_within, modules_at
from nxdt_core.models.quantised import BaseDtype
from nxdt_core.models.random.dropout import Dropout, MaskPart, RowPart, TokenNumbers, encoded_name, whole_sequence
from nxdt_core.models.step_boundary import accept_step
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.mesh import MeshSizes, Schedule, stages_of_rank
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.plan import InitRule, ParallelPlan
from nxdt_core.protocols.precision import PrecisionPolicy

_SALT_BITS = 62
_TRAINED, _FROZEN = 6, 4
"""Operations per weight and token: two in forward, two for the gradient of the input, two for that of the weight."""
_ONCE, _TWICE = 3, 4
"""Products in forward and backward, without and with forward repeated in backward."""


def set_dropout_salts(module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, *, sequence_parallel: bool) -> None:
    """Set ``salt`` and ``part`` of the modules that have them (:mod:`nxdt_core.models.random.dropout`).

    Args:
        module: one pipeline stage, whose paths are those of the whole model; changed in place.
        plan: names the tensor blocks.
        mesh: says which ranks hold the same values; in one process there are no salts.
        sequence_parallel: activations outside the tensor blocks are cut along the sequence.
    """
    cp = mesh.size("cp")
    runs = partial(zigzag_runs, mesh.rank("cp"), cp) if cp > 1 else whole_sequence
    tensor_part, tokens = (mesh.rank("tp"), mesh.size("tp")), (mesh.rank("dp"), mesh.rank("cp"))
    for path, part in module.named_modules():
        if isinstance(part, LocalDispatcher):
            neighbours = module.get_submodule(path.rpartition(".")[0]).modules()
            if any(isinstance(other, Dropout) and other.dispatched and other.p for other in neighbours):
                part.numbers = TokenNumbers(shards=cp, runs=runs)
        if not hasattr(part, "salt"):
            continue
        inside = any(matches_within(block, path) for block in plan.tensor_blocks)
        if isinstance(part, Dropout) and part.dispatched:
            part.part = RowPart(name=encoded_name(path), feature_part=0 if part.whole else mesh.rank("tp"))
        elif isinstance(part, Dropout):
            part.part = MaskPart(
                name=encoded_name(path),
                shards=cp,
                runs=runs,
                sequence_parts=tensor_part,
                features=part.features,
                feature_parts=tensor_part if inside and not part.whole and part.features is None else (0, 1),
            )
        if mesh.sizes.world_size == 1:
            continue
        by_rank = (sequence_parallel or inside) and not getattr(part, "whole", False)
        name = "\0".join(map(str, (path, *tokens, mesh.rank("tp") if by_rank else "all")))
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        part.salt = int.from_bytes(digest, "little") >> (64 - _SALT_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """Settings of a run's layout in addition to the sizes of the mesh."""

    profile: DeviceProfile = CPU
    """Facts about the device type."""
    sequence_parallel: bool = False
    async_tensor_parallel: bool = False
    """Let compiled layers send parts of tensors while they compute with others."""
    regathers: bool = False
    """Gather the inputs of tensor blocks again in backward."""
    pad_heads: bool = False
    context_parallel_method: Literal["ring", "gather"] = "ring"
    sliced_tokens: Sliced = "none"
    """Rows of which each tensor parallel rank sends a slice to experts, and not the whole."""
    token_shuffle: int = 1
    """Data parallel ranks that exchange tokens before experts."""
    pipeline_cuts: tuple[str, ...] | None = None
    """Modules that end a stage; None: :func:`pipeline_cuts` chooses."""
    seq_length: int = 1
    micro_batches: int | None = None
    """Micro-batches of a step, per rank; None: enough to fill the pipeline."""
    recompute_granularity: Literal["selective", "full"] | None = None
    recompute_names: tuple[str, ...] = ()
    loss_chunk_tokens: int | None = None
    compile_backend: str | None = None
    """Backend of ``torch.compile``; None: run layers as they are written."""
    row_kernels: RowKernels = IN_CHUNKS
    """Kernels that compute on rows of logits."""
    base_dtype: BaseDtype | None = None
    """Dtype that frozen weights of linear layers are quantised to."""
    frozen: bool = False
    """The model only runs forward: nothing trains, except what adapters add."""

    def of_frozen(self) -> LayoutOptions:
        """Return the options of a model that runs forward only, next to the one that these are for."""
        return replace(
            self,
            frozen=True,
            token_shuffle=1,
            pipeline_cuts=None,
            recompute_granularity=None,
            recompute_names=(),
            base_dtype=None,
        )

    @classmethod
    def of(cls, run: RunConfig, profile: DeviceProfile, sizes: MeshSizes) -> LayoutOptions:
        """Return the options of a configuration for a device type."""
        backend, static_shapes = profile.compile_backend if run.model.compile else None, profile.static_shapes
        sliced: Sliced = "none"
        if sizes.tp * sizes.ep > run.trainer.devices:  # neighbours in ep are tp ranks apart
            sliced = "capacity" if run.model.compile else "all"
        return cls(
            profile=profile,
            sequence_parallel=run.distributed_strategy.sequence_parallel and sizes.tp > 1,
            async_tensor_parallel=run.distributed_strategy.async_tensor_parallel and sizes.tp > 1,
            regathers=run.distributed_strategy.sequence_parallel_regather,
            pad_heads=run.distributed_strategy.pad_heads,
            context_parallel_method=run.distributed_strategy.context_parallel_method or profile.context_parallel_method,
            sliced_tokens=sliced,
            token_shuffle=run.distributed_strategy.token_shuffle_group_size,
            pipeline_cuts=run.model.pipeline_cuts,
            seq_length=run.data.seq_length,
            micro_batches=run.data.global_batch_size // (run.data.micro_batch_size * sizes.dp),
            recompute_granularity=run.model.activations_checkpoint_granularity,
            recompute_names=run.model.activations_checkpoint_recompute or (),
            loss_chunk_tokens=run.model.loss_chunk_tokens,
            compile_backend=backend,
            row_kernels=IN_CHUNKS if backend is None else compiled_rows(backend, static_shapes=static_shapes),
            base_dtype=run.adapter.base_dtype,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """This rank's part of a model: its pipeline stages, sharded. Without a pipeline, one stage is the whole model."""

    modules: tuple[nn.Module, ...]
    numbers: tuple[int, ...]
    """Number of each stage in the whole pipeline."""
    plan: ParallelPlan
    """Includes the changes of adapters."""
    rules: tuple[InitRule, ...]
    added: frozenset[str]
    """Parameters of the whole model that adapters added."""
    tensor_partial: frozenset[str]
    """Parameters whose gradient is a partial sum on each tensor parallel rank."""
    padded: Mapping[str, PaddedDim]
    """Parameters with heads of zeros, which no checkpoint sees."""
    storage: WeightStorage
    sequence_parallel: bool
    """Hidden states between layers are parts of the sequence."""
    compiled: bool
    """Layers are compiled."""
    routers: Mapping[str, int]
    """Number of experts by router of the whole model, those of other stages included."""
    gathers: tuple[WeightGather, ...] = ()
    """Gathers of FSDP2 that send weights in another form than FSDP2 passes to them."""


def parallelize(
    builder: ModelBuilder,
    mesh: ParallelMesh,
    options: LayoutOptions,
    precision: PrecisionPolicy,
    adapters: Sequence[Adapter] = (),
) -> Layout:
    """Build this rank's stages on the meta device, without communication.

    Raises:
        NxdtError: the model's plan does not allow the layout.
    """
    sequence_parallel, compiled = options.sequence_parallel, options.compile_backend is not None
    regather = sequence_parallel and options.regathers
    recompute = options.recompute_granularity is not None
    check_whole_backward(mesh.sizes.schedule, recompute=recompute, compiled=compiled, regather=regather)
    built = build_whole(builder, adapters)
    whole, plan = built.module, built.plan
    if options.frozen and not adapters:  # which freeze what their checkpoints leave out
        whole.requires_grad_(False)
    _check_supported(whole, plan, mesh, options)
    set_dtypes(whole, plan, precision)

    numbers: tuple[int, ...] = (0,)
    modules: tuple[nn.Module, ...] = (whole,)
    if (stages := mesh.sizes.stages) > 1:
        numbers = stages_of_rank(mesh.rank("pp"), mesh.sizes.pp, mesh.sizes.vpp, mesh.sizes.schedule)
        cuts = pipeline_cuts(whole, plan, builder, mesh.sizes, options)
        modules = tuple(cut_stage(whole, plan, stage=number, stages=stages, cuts=cuts) for number in numbers)
    tensor_partial: set[str] = set()
    padded: dict[str, PaddedDim] = {}
    gathers: list[WeightGather] = []
    storage = WeightStorage.of(mesh.sizes, precision, micro_batches=options.micro_batches or 1)
    profile, blocks = options.profile, block_attention(options.profile)
    shared: frozenset[torch.dtype] | None = None
    if profile.shared_heads is not None:
        shared = frozenset(getattr(torch, name) for name in profile.shared_heads)
    for module in modules:
        accept_step(module)
        # Tensor, expert and context parallelism.
        if mesh.sizes.tp > 1:
            apply_tensor_parallel(
                module,
                plan,
                mesh,
                sequence_parallel=sequence_parallel,
                regathers=options.regathers,
                pad_heads=options.pad_heads,
            )
        # A frozen model without experts may be next to one that has some.
        if mesh.sizes.ep * mesh.sizes.tp * mesh.sizes.cp > 1 and (plan.experts.modules or not options.frozen):
            apply_expert_parallel(module, plan, mesh, sequence_parallel=sequence_parallel, sliced=options.sliced_tokens)
        if options.token_shuffle > 1:
            apply_token_shuffle(module, plan, mesh, ranks=options.token_shuffle)
        if mesh.sizes.tp > 1:  # after experts are cut: what tensor parallelism shards has no partial sums
            tensor_partial |= partial_parameters(module, plan, sequence_parallel=sequence_parallel)
            padded |= padded_parameters(module)
        set_dropout_salts(module, plan, mesh, sequence_parallel=sequence_parallel)
        if options.base_dtype is not None:
            quantise_frozen(module, plan, options.base_dtype)
        if mesh.sizes.cp > 1:
            apply_context_parallel(module, plan, mesh, method=options.context_parallel_method)
        # Attention by blocks, products of linear layers, the loss.
        for part in module.modules():
            if isinstance(part, CausalAttention):
                part.blocks, part.shared_heads = blocks, shared
        if precision.linear_product is not None:
            apply_product(module, plan, precision.linear_product(profile.device_type))
        if options.loss_chunk_tokens is not None:
            chunk_loss(module, plan, tokens=options.loss_chunk_tokens, kernels=options.row_kernels)
        # Activation checkpointing, compilation, data parallelism.
        if recompute:
            apply_recompute(module, plan, granularity=options.recompute_granularity, names=options.recompute_names)
        if regather:
            for part in parts_of_recomputed(module):  # which gathers again anyway
                entry = getattr(part, "entry", None)
                if isinstance(entry, BlockEntry):
                    entry.again = False
            discard_in_layers(module, plan)
        if options.compile_backend is not None:
            if options.async_tensor_parallel:
                pipeline_collectives(mesh)
            compile_layers(module, plan, backend=options.compile_backend, static_shapes=profile.static_shapes)
        if storage.sharded:
            experts = modules_at(module, plan.experts.modules) if mesh.sizes.ep > 1 else ()
            gathers += apply_data_parallel(module, plan, mesh, precision, experts, compiled=compiled)
    return Layout(
        modules=modules,
        numbers=numbers,
        plan=plan,
        rules=built.rules,
        added=built.added,
        tensor_partial=frozenset(tensor_partial),
        padded=padded,
        storage=storage,
        sequence_parallel=sequence_parallel,
        compiled=compiled,
        routers=routers_of(whole, plan) if plan.experts.routers else {},
        gathers=tuple(gathers),
    )


def pipeline_cuts(
    whole: nn.Module, plan: ParallelPlan, builder: ModelBuilder, sizes: MeshSizes, options: LayoutOptions
) -> tuple[str, ...] | None:
    """Return the cuts that the configuration names, or else those of the shortest step; the same on all ranks.

    None cuts evenly: without a pipeline, and where layers share parameters, which have to stay on one stage.

    Raises:
        FewerLayersThanStages: a stage would have no layer.
    """
    if options.pipeline_cuts is not None or sizes.stages == 1 or plan.pipeline is None:
        return options.pipeline_cuts
    if not ties_ends(plan):
        return None
    costs, count = part_costs(whole, plan, builder, options), options.micro_batches or 0
    if not micro_batches_fit(sizes.schedule, sizes.pp, count):  # who runs the schedule refuses them
        count = 2 * sizes.stages
    return choose_cuts(costs, sizes, micro_batches=count)


def part_costs(whole: nn.Module, plan: ParallelPlan, builder: ModelBuilder, options: LayoutOptions) -> PartCosts:
    """Return what layers, and the parts before and after them, cost in a step with ``options``.

    ``whole`` has its adapters and is not sharded; ``plan`` has a pipeline.
    """
    assert plan.pipeline is not None
    names = [f"{plan.pipeline.layers}.{key}" for key, _ in whole.get_submodule(plan.pipeline.layers).named_children()]
    modules = dict(whole.named_modules())
    top_k = {
        path: int(part.top_k)
        for path, part in modules.items()
        if matches_any(plan.experts.routers, path) and hasattr(part, "top_k")
    }
    # Matrix products of a token, by module; experts count as far as it is sent to them by the router that is nearest
    # to them in the tree of modules.
    work: Counter[str] = Counter()
    for path, module in modules.items():
        for parameter in () if isinstance(module, nn.Embedding) else module.parameters(recurse=False):
            if parameter.ndim < 2:
                continue
            elements = parameter.numel()
            if matches_any(plan.experts.modules, path):
                nearest = max(top_k, key=partial(_shared_depth, path), default="")
                elements = elements * top_k.get(nearest, 1) // parameter.shape[0]
            work[path] += elements * (_TRAINED if parameter.requires_grad else _FROZEN)
    # The operations of all attention cores are divided among them by the tokens that each attends to.
    length = max(options.seq_length, 2)
    attention = (builder.flops_per_token(length) - builder.flops_per_token(1)) * length / (length - 1)
    # Scores are computed with the tokens of the window; with a cap, they are with all, and a window hides some.
    seen: dict[str, int] = {}
    for path, core in modules.items():
        if matches_any(plan.attention_cores, path):
            semantics: AttentionSemantics | None = core.semantics() if hasattr(core, "semantics") else None
            window = None if semantics is None or semantics.softcap is not None else semantics.window
            seen[path] = min(window or length, length)
    work.update({path: round(attention * tokens / sum(seen.values())) for path, tokens in seen.items()})
    layers: Counter[str] = Counter()
    first = last = 0
    for path, operations in work.items():
        layer = ".".join(path.split(".")[: plan.pipeline.layers.count(".") + 2])
        if layer in names:
            layers[layer] += operations
        elif any(f"{path}.".startswith(f"{module}.") for module in plan.pipeline.first):
            first += operations
        elif any(f"{path}.".startswith(f"{module}.") for module in plan.pipeline.last):
            last += operations
    return PartCosts(
        layers={name: layers[name] * (_TWICE if options.recompute_granularity == "full" else _ONCE) for name in names},
        first=first * _ONCE,
        last=last * (_ONCE if options.loss_chunk_tokens is None else _TWICE),
    )


def _shared_depth(path: str, other: str) -> int:
    """Return how many components of two paths are equal from the first on."""
    pairs = zip(path.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def check_whole_backward(schedule: Schedule, *, recompute: bool, compiled: bool, regather: bool = False) -> None:
    """Refuse what needs backward in one piece where the schedule runs it in two.

    Recomputation would stay right, but every weight's gradient requests it again: a Llama layer was recomputed up to
    ten times per micro-batch. A compiled layer's backward is one kernel graph, which frees what the second pass needs.

    Raises:
        ZeroBubbleCannot: one of them is asked for under ``zbv``.
    """
    if schedule != "zbv":
        return
    if recompute:
        raise ZeroBubbleCannot(
            feature="activation recomputation", without="model.activations_checkpoint_granularity=null"
        )
    if regather:
        raise ZeroBubbleCannot(
            feature="gathering inputs again in backward",
            without="distributed_strategy.sequence_parallel_regather=false",
        )
    if compiled:
        raise ZeroBubbleCannot(feature="a compiled model", without="model.compile=false")


def block_attention(profile: DeviceProfile) -> BlockAttention | None:
    """Return how a device type attends to packed documents by blocks; None where it does so under a mask."""
    dtypes = frozenset(getattr(torch, name) for name in profile.block_attention)
    return BlockAttention(dtypes, backend=profile.compile_backend) if dtypes else None


def _check_supported(whole: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, options: LayoutOptions) -> None:
    """Check that the model allows the layout, and that the device type has what the layout needs."""
    if options.base_dtype is not None and next(frozen_layers(whole, plan), None) is None:
        reason, instead = "the adapter freezes no weight of a linear layer", "Let it freeze some"
        raise BaseNotQuantised(dtype=options.base_dtype, reason=reason, instead=instead)
    dimensions: tuple[Dimension, ...] = ("tp", "pp", "ep", "cp")
    for dimension in dimensions:
        if mesh.size(dimension) > 1 and dimension in plan.refused:
            reason, model = plan.refused[dimension], type(whole).__name__
            raise LayoutRefused(model=model, dimension=dimension, size=mesh.size(dimension), reason=reason)
    for path, experts in routers_of(whole, plan).items() if options.profile.static_shapes else ():
        router: Any = whole.get_submodule(path)
        if getattr(router, "capacity_factor", 0) is None:  # experts get as many tokens as choose them
            raise ShapesDependOnData(path=path, experts=experts, top_k=int(router.top_k))
    if options.async_tensor_parallel and not options.profile.symmetric_memory:
        raise NoSymmetricMemory(device_type=options.profile.device_type)
    if mesh.sizes.ep > 1 and not options.profile.all_to_all:
        for path, chunks in exchange_chunks(whole, plan).items():
            if chunks > 1:  # ranks would wait for each exchange
                raise ExchangeInOnePart(path=path, chunks=chunks, device_type=options.profile.device_type)


@torch.no_grad()
def materialise(layout: Layout, device: torch.device, *, seed: int, base: bool = True) -> None:
    """Allocate the stages on ``device`` and draw their initial weights; without ``base`` only those that adapters
    added, the others stay undefined for a load.

    Every rank draws its own shards alone, bitwise equal to those elements of the whole.
    """
    owners = {user: owner for owner, user in layout.plan.tied}
    for module in layout.modules:
        allocate(module, device, tied=layout.plan.tied)
        for name, parameter in module.named_parameters():
            if base or name in layout.added:
                name = owners.get(name, name)  # a stage with the user of a tied pair alone draws the owner's elements
                shard = local_shard_of(parameter)
                if name in layout.padded:
                    shard.tensor.zero_()
                    shard = unpadded_shard(parameter, layout.padded[name])
                draw_local_shard(shard, name, layout.rules, seed=seed)
