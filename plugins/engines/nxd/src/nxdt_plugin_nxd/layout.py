"""From a builder's plain module to this rank's pipeline stage with the library's layers, and its weights.

The order is that of :class:`nxdt_core.protocols.plan.ParallelPlan`: adapters, pipeline cut, tensor parallel layers,
dropouts, recomputation. Ranks that hold the same values drop the same elements, as under the torch engine. The module
is on the meta device until :func:`materialise`, as otherwise every rank would hold each whole matrix once.

The library's layers have the paths and parameter names of the modules that they replace. The gradient of what enters a
tensor block is summed once for all layers in it, where each of the library's own would sum for itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast, final

import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_distributed.parallel_layers.mappings import (
    copy_to_tensor_model_parallel_region,
    enter_expert_parallel_region,
    exit_expert_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from neuronx_distributed.parallel_layers.utils import set_tensor_model_parallel_attributes
from torch import nn
from torch.nn import functional

from nxdt_core.config import ResolvedConfig
from nxdt_core.engine.expert import ExchangingDispatcher
from nxdt_core.engine.pipeline.split import cut_stage
from nxdt_core.engine.recompute import apply_recompute
from nxdt_core.engine.weights import allocate, build_whole, draw_local_shard
from nxdt_core.errors.layouts import LayoutRefused, ModelWithoutExperts, ShapesDependOnData
from nxdt_core.models.loss import cross_entropies, log_partition
from nxdt_core.models.moe.router import WholeMicroBatch
from nxdt_core.models.patterns import matches_any, modules_at
from nxdt_core.models.random.dropout import Dropout, MaskPart, encoded_name
from nxdt_core.models.step_boundary import accept_step
from nxdt_core.models.updates import Update, updated_linear
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.batch import IGNORE_INDEX
from nxdt_core.protocols.mesh import stages_of_rank
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.plan import InitRule, ParallelPlan
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_core.protocols.step_context import StepContext
from nxdt_core.protocols.tensor_shards import LocalShard, TensorSlice
from nxdt_plugin_nxd.errors import VocabularyIsSharded
from nxdt_plugin_nxd.library import computes_on_host
from nxdt_plugin_nxd.translation import MeshCoordinates, Shard, Translation, is_within, translate

_META = torch.device("meta")
_SEQUENCE_DIM = 1
"""Index of the sequence in [batch, seq, hidden]."""


_SALT_BITS = 62


def apply_translation(module: nn.Module, translation: Translation, *, sequence_parallel: bool) -> None:
    """Put the library's layers into ``module``, on the meta device."""
    for replacement in translation.replacements:
        part = module.get_submodule(replacement.path)
        layer: nn.Module
        if isinstance(part, nn.Embedding) and replacement.style == "replicate":
            layer = SequenceEmbedding(part)
        elif isinstance(part, nn.Embedding):
            layer = VocabularyEmbedding(part, sequence_parallel=sequence_parallel)
        elif replacement.style == "row":
            layer = RowLinear(cast(nn.Linear, part), sequence_parallel=sequence_parallel)
        else:
            kind = VocabularyHead if replacement.style == "vocab_head" else ColumnLinear
            layer = kind(cast(nn.Linear, part), replacement.copies)
        for leaf, parameter in part.named_parameters(recurse=False):
            getattr(layer, leaf).requires_grad_(parameter.requires_grad)
        module.set_submodule(replacement.path, layer)

    def entry(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Enter a tensor block: with all parts of the sequence, or with gradients that are summed over its ranks."""
        if sequence_parallel:
            return gather_from_sequence_parallel_region(args[0], _SEQUENCE_DIM), *args[1:]
        return copy_to_tensor_model_parallel_region(args[0]), *args[1:]

    for path in translation.blocks:
        # Prepended: a hook that belongs to the module itself, such as one of a caller, sees what enters the block.
        module.get_submodule(path).register_forward_pre_hook(entry, prepend=True)
    for path in translation.dispatchers:
        module.set_submodule(path, ExpertDispatcher(sequence_parallel=sequence_parallel))
    for path in translation.routers:
        copies = parallel_state.get_tensor_model_parallel_size()
        module.get_submodule(path).shards = WholeMicroBatch(copies=copies)  # type: ignore[assignment]
    # Parameters of modules that are not replaced: experts, and what adapters added.
    for name, shard in translation.shards.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        parameter, local = getattr(owner, leaf), shard.region(0).shape
        if tuple(parameter.shape) != local:
            empty = torch.empty(local, dtype=parameter.dtype, device=_META)
            setattr(owner, leaf, nn.Parameter(empty, requires_grad=parameter.requires_grad))


def _update_of(part: nn.Module, shard_dim: int) -> nn.Module | None:
    """Return an adapter's update of a layer, adapted to the part of the layer's weight on this rank."""
    update = getattr(part, "update", None)
    if not isinstance(update, Update):
        return None
    rank, ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_size()
    inputs = getattr(part, "in_features", 0) // ranks
    for dropout in (module for module in update.modules() if isinstance(module, Dropout)):
        dropout.whole = shard_dim == 0
        dropout.features = None if dropout.whole else (rank * inputs, inputs * ranks)
    if shard_dim == update.inputs:
        update.over_inputs = reduce_from_tensor_model_parallel_region
    return update


def _summed(partial: torch.Tensor, *, sequence_parallel: bool) -> torch.Tensor:
    """Leave a tensor block: the sum over the ranks, whole or this rank's part of the sequence."""
    if sequence_parallel:
        part: torch.Tensor = reduce_scatter_to_sequence_parallel_region(partial, _SEQUENCE_DIM)
        return part
    whole: torch.Tensor = reduce_from_tensor_model_parallel_region(partial)
    return whole


class ColumnLinear(ColumnParallelLinear):  # type: ignore[misc]  # the library has no types
    """A linear layer of which each rank computes its own output features, from whole hidden states."""

    def __init__(self, part: nn.Linear, copies: int = 1) -> None:
        """``copies`` of key and value heads are so many more heads to the library."""
        super().__init__(
            part.in_features,
            part.out_features * copies,
            bias=part.bias is not None,
            gather_output=False,
            dtype=part.weight.dtype,
            device=_META,
        )
        self.update = _update_of(part, 0)

    def forward(self, hidden: torch.Tensor) -> Any:
        """[..., in] to [..., out / tp]."""
        return updated_linear(hidden, self.weight, self.bias, self.update)


class VocabularyHead(ColumnLinear):
    """The output projection; its logits say that they are a part."""

    def forward(self, hidden: torch.Tensor) -> Any:
        """[..., hidden] to the logits of this rank's part of the vocabulary."""
        return ShardedLogits(super().forward(hidden))


class RowLinear(RowParallelLinear):  # type: ignore[misc]
    """A linear layer of which each rank multiplies its own input features; the products are summed over the ranks."""

    def __init__(self, part: nn.Linear, *, sequence_parallel: bool) -> None:
        super().__init__(
            part.in_features,
            part.out_features,
            bias=part.bias is not None,
            input_is_parallel=True,
            dtype=part.weight.dtype,
            device=_META,
            sequence_parallel_enabled=sequence_parallel,
            sequence_dimension=_SEQUENCE_DIM if sequence_parallel else None,
        )
        self.update = _update_of(part, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[batch, seq, in / tp] to [batch, seq, out], or to this rank's part of the sequence."""
        product = updated_linear(hidden, self.weight, None, self.update)
        total = _summed(product, sequence_parallel=self.sequence_parallel_enabled)
        return total if self.bias is None else total + self.bias


class VocabularyEmbedding(ParallelEmbedding):  # type: ignore[misc]
    """The library's embedding, whose own sum over ranks is left out where the sequence is the second dimension."""

    def __init__(self, table: nn.Embedding, *, sequence_parallel: bool) -> None:
        with _META:
            super().__init__(
                table.num_embeddings, table.embedding_dim, device=_META, dtype=table.weight.dtype, collect_output=False
            )
        self.sequence_parallel = sequence_parallel
        if table.padding_idx is not None:  # the library takes 0 for none
            here = table.padding_idx - self.start_index
            self.padding_idx = here if 0 <= here < self.num_embeddings_per_partition else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [batch, seq] to [batch, seq, hidden], or to this rank's part of the sequence."""
        return _summed(super().forward(ids), sequence_parallel=self.sequence_parallel)


class SequenceEmbedding(nn.Embedding):
    """A whole table, such as learned positions, that looks up this rank's part of the sequence."""

    def __init__(self, table: nn.Embedding) -> None:
        with _META:
            super().__init__(table.num_embeddings, table.embedding_dim, table.padding_idx, dtype=table.weight.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [..., seq] to [..., seq / tp, hidden]."""
        length = ids.shape[-1] // parallel_state.get_tensor_model_parallel_size()
        part = ids.narrow(-1, parallel_state.get_tensor_model_parallel_rank() * length, length)
        return functional.embedding(part, self.weight, self.padding_idx)


class ExpertDispatcher(ExchangingDispatcher):
    """Runs experts of which each rank holds some, or a part of each, and ends their tensor block."""

    def __init__(self, *, sequence_parallel: bool) -> None:
        ranks = parallel_state.get_expert_model_parallel_size()
        super().__init__(parallel_state.get_expert_model_parallel_group() if ranks > 1 else None)
        self.sequence_parallel = sequence_parallel

    def run_padded(self, rows: torch.Tensor, experts: nn.Module) -> torch.Tensor:
        """Return the outputs of ``rows`` [experts, capacity, hidden] from the ranks that hold the experts."""
        if self.group is None or computes_on_host():  # the library's exchange has no CPU mode
            return super().run_padded(rows, experts)
        arrived = enter_expert_parallel_region(rows, scatter_gather=False)  # [experts here, ranks, capacity, hidden]
        outputs = experts(arrived.flatten(1, 2)).view(arrived.shape)
        returned: torch.Tensor = exit_expert_parallel_region(outputs, scatter_gather=False)
        return returned

    def finish(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return the sum of what the tensor parallel ranks computed, whole or this rank's part of the sequence."""
        if parallel_state.get_tensor_model_parallel_size() == 1:
            return mixed
        return _summed(mixed, sequence_parallel=self.sequence_parallel)


@final
class ShardedLogits:
    """Logits of this rank's vocabulary; no tensor, so that an objective that takes them for whole logits fails."""

    __slots__ = ("local",)

    def __init__(self, local: torch.Tensor) -> None:
        """``local`` [batch, seq, vocab / tp]."""
        self.local = local

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise VocabularyIsSharded(attribute=name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        del types, args, kwargs
        raise VocabularyIsSharded(attribute=getattr(function, "__name__", str(function)))


def sharded_cross_entropies(logits: torch.Tensor | ShardedLogits, labels: torch.Tensor | None) -> torch.Tensor:
    """Compute :func:`nxdt_core.models.loss.cross_entropies` by the library's loss; equal on all ranks.

    In float32: the library computes in the dtype of the logits, and in their memory.

    Raises:
        VocabularyIsSharded: without labels, since the library has no log-sum-exp over ranks.
    """
    if not isinstance(logits, ShardedLogits):
        whole = StepContext()  # without a loss of shards, as this is one
        return log_partition(logits, whole) if labels is None else cross_entropies(logits, labels, whole)
    if labels is None:
        raise VocabularyIsSharded(attribute="log_partition")
    from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy

    targets = labels.masked_fill(labels == IGNORE_INDEX, 0)
    copy = logits.local.to(torch.promote_types(logits.local.dtype, torch.float32), copy=True)
    losses: torch.Tensor = parallel_cross_entropy(copy, targets)
    return losses


def whole_logits(logits: torch.Tensor | ShardedLogits) -> torch.Tensor:
    """Return the logits of the whole vocabulary; a collective where they are sharded."""
    if not isinstance(logits, ShardedLogits):
        return logits
    whole: torch.Tensor = gather_from_tensor_model_parallel_region(logits.local)
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """This rank's pipeline stages; the whole model without a pipeline."""

    modules: tuple[nn.Module, ...]
    """Pipeline stages of this rank, in their order; their paths are those of the whole model."""
    plan: ParallelPlan
    """Plan with the changes of adapters."""
    rules: tuple[InitRule, ...]
    added: frozenset[str]
    """Parameters of the whole model that adapters added."""
    shards: Mapping[str, Shard]
    """Shards by the parameter's path; one that is absent is whole on each rank."""
    partial: frozenset[str]
    """Parameters whose gradient is a partial sum on each tensor parallel rank."""

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of all modules by path, tied ones under each of their paths."""
        return {name: p for part in self.modules for name, p in part.named_parameters(remove_duplicate=False)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParameter:
    """A parameter of this rank under its global name."""

    parameter: nn.Parameter
    shard: Shard | None
    partial: bool
    counted: bool
    """True if sums over all ranks count its elements on this rank."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    region: TensorSlice
    """Place of its elements in the whole parameter."""

    @property
    def distributed(self) -> bool:
        """True for experts that are distributed over ranks."""
        return self.shard is not None and self.shard.expert_parts > 1

    def local_shard(self, tensor: torch.Tensor) -> torch.Tensor | LocalShard:
        """Return a tensor of the parameter's local shape as a checkpoint takes it."""
        return tensor if self.shard is None else LocalShard(tensor, self.shape, self.region)


def parallelize(
    builder: ModelBuilder,
    place: MeshCoordinates,
    config: ResolvedConfig,
    precision: PrecisionPolicy,
    adapters: Sequence[Adapter] = (),
    *,
    fixed_shapes: bool = False,
) -> Stage:
    """Build this rank's stages on the meta device, without communication.

    Adapters change the model in their order. With ``fixed_shapes``, the device compiles a graph for each shape.

    Raises:
        ShapesDependOnData: the shapes of ``fixed_shapes`` would change with the data.
        NxdtError: the model's plan, or the library, does not allow the layout.
    """
    run, sizes = config.run, place.sizes
    built = build_whole(builder, adapters)
    whole, plan = built.module, built.plan
    for dimension, reason in plan.refused.items():
        if (size := getattr(sizes, dimension)) > 1:
            raise LayoutRefused(model=type(whole).__name__, dimension=dimension, size=size, reason=reason)
    for path, router in whole.named_modules() if fixed_shapes else ():
        # Experts get as many tokens as choose them.
        if matches_any(plan.experts.routers, path) and getattr(router, "capacity_factor", 0) is None:
            raise ShapesDependOnData(path=path, experts=int(router.experts), top_k=int(router.top_k))
    whole.to(torch.float32 if precision.master_weights else getattr(torch, precision.parameters))
    if sizes.ep > 1 and not plan.experts.modules:
        raise ModelWithoutExperts(ep=sizes.ep)
    modules: tuple[nn.Module, ...] = (whole,)
    if sizes.pp > 1:
        numbers = stages_of_rank(place.pp, sizes.pp, sizes.vpp, sizes.schedule)
        cuts = run.model.pipeline_cuts
        modules = tuple(cut_stage(whole, plan, stage=stage, stages=sizes.stages, cuts=cuts) for stage in numbers)
    shards: dict[str, Shard] = {}
    partial: set[str] = set()
    sequence_parallel = run.distributed_strategy.sequence_parallel and sizes.tp > 1
    for module in modules:
        accept_step(module)
        if sizes.tp > 1 or sizes.ep > 1:
            translation = translate(module, plan, tp=sizes.tp, ep=sizes.ep, sequence_parallel=sequence_parallel)
            apply_translation(module, translation, sequence_parallel=sequence_parallel)
            shards |= translation.shards
            partial |= translation.partial
        _place_dropouts(module, plan, place, sequence_parallel=sequence_parallel)
        apply_recompute(
            module,
            plan,
            granularity=run.model.activations_checkpoint_granularity,
            names=run.model.activations_checkpoint_recompute or (),
        )
    return Stage(
        modules=modules, plan=plan, rules=built.rules, added=built.added, shards=shards, partial=frozenset(partial)
    )


def materialise(stage: Stage, place: MeshCoordinates, device: torch.device, *, seed: int, base: bool = True) -> None:
    """Give the stages memory on ``device`` and draw their weights; without ``base``, only those that adapters added.

    Every rank draws its own elements, bitwise equal to those of the whole parameter.
    """
    for module in stage.modules:
        allocate(module, device, tied=stage.plan.tied)
    for name, local in parameters_of(stage, place).items():
        parameter, shard = local.parameter, local.shard
        if not local.counted:
            parameter.shared = True  # type: ignore[attr-defined]  # the library's norms count its elements elsewhere
        if shard is not None and place.sizes.tp > 1 and not hasattr(parameter, "tensor_model_parallel"):
            # Memory has been given to them, which drops attributes.
            set_tensor_model_parallel_attributes(parameter, True, shard.dim, 1, num_partitions=shard.parts)
        if local.distributed:
            parameter.expert_model_parallel = True  # type: ignore[attr-defined]
        if base or name in stage.added:
            draw_local_shard(LocalShard(local.parameter, local.shape, local.region), name, stage.rules, seed=seed)


def round_to(stage: Stage, dtype: torch.dtype) -> None:
    """Round the parameters, of which masters have been taken, to the dtype that is computed with."""
    for parameter in stage.named_parameters().values():
        parameter.data = parameter.data.to(dtype)
    for part in (part for module in stage.modules for part in module.modules()):
        if isinstance(part, ParallelEmbedding):  # its outputs have this dtype
            part.dtype = dtype


def parameters_of(stage: Stage, place: MeshCoordinates) -> dict[str, LocalParameter]:
    """Return this rank's parameters by global name; a tied one goes by its owner's name."""
    parameters, here = stage.named_parameters(), {}
    owner_of = {user: owner for owner, user in stage.plan.tied}
    for path, parameter in parameters.items():
        name = owner_of.get(path, path)
        if name != path and name in parameters:
            continue  # the same parameter as its owner, which is here
        shard = stage.shards.get(path)
        shape = tuple(parameter.shape) if shard is None else shard.shape
        here[name] = LocalParameter(
            parameter=parameter,
            shard=shard,
            partial=path in stage.partial,
            counted=name == path and (shard is None or place.tp % shard.copies == 0),
            shape=shape,
            region=TensorSlice.whole(shape) if shard is None else shard.region(place.tp, place.ep),
        )
    return here


def _place_dropouts(module: nn.Module, plan: ParallelPlan, place: MeshCoordinates, *, sequence_parallel: bool) -> None:
    """Fill the slots of the modules of a stage that draw masks (:mod:`nxdt_core.models.random.dropout`).

    Under ``sequence_parallel`` activations outside the tensor blocks are parts of the sequence. A single process has no
    salts.
    """
    blocks, tensor_part = modules_at(module, plan.tensor_blocks), (place.tp, place.sizes.tp)
    for path, part in module.named_modules():
        if not hasattr(part, "salt"):
            continue
        inside, whole = is_within(path, blocks), bool(getattr(part, "whole", False))
        if isinstance(part, Dropout) and not part.dispatched:
            part.part = MaskPart(
                name=encoded_name(path),
                sequence_parts=tensor_part,
                features=part.features,
                feature_parts=tensor_part if inside and not whole and part.features is None else (0, 1),
            )
        if place.sizes.world_size > 1:
            differs = (sequence_parallel or inside) and not whole
            name = "\0".join(map(str, (path, place.dp, 0, place.tp if differs else "all")))
            digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
            part.salt = int.from_bytes(digest, "little") >> (64 - _SALT_BITS)
