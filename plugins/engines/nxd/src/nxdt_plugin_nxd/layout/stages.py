"""From a builder's plain module to this rank's pipeline stage with the library's layers, and its weights.

The order is that of :class:`nxdt_core.protocols.plan.ParallelPlan`: adapters, pipeline cut, tensor parallel layers,
dropouts, recomputation. Ranks that hold the same values drop the same elements, as under the torch engine. The module
is on the meta device until :func:`materialise`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from neuronx_distributed.parallel_layers.layers import ParallelEmbedding
from neuronx_distributed.parallel_layers.utils import set_tensor_model_parallel_attributes
from torch import nn

from nxdt_core.config import ResolvedConfig
from nxdt_core.engine.pipeline.split import cut_stage
from nxdt_core.engine.recompute import apply_recompute
from nxdt_core.engine.weights import allocate, build_whole, draw_piece
from nxdt_core.errors.layouts import LayoutRefused, ModelWithoutExperts, ShapesDependOnData
from nxdt_core.models.patterns import matches_any
from nxdt_core.models.random.dropout import Dropout, MaskPart, encoded_name
from nxdt_core.models.step_border import let_take_step
from nxdt_core.protocols.adapter import Adapter
from nxdt_core.protocols.mesh import stages_of_rank
from nxdt_core.protocols.model import ModelBuilder
from nxdt_core.protocols.piece import Box, Piece
from nxdt_core.protocols.plan import InitRule, ParallelPlan
from nxdt_core.protocols.precision import PrecisionPolicy
from nxdt_plugin_nxd.layout.layers import apply_translation
from nxdt_plugin_nxd.layout.translation import MeshCoordinates, Shard, is_within, paths_of, translate


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
        return {name: each for part in self.modules for name, each in part.named_parameters(remove_duplicate=False)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParameter:
    """A parameter of this rank under its global name."""

    parameter: nn.Parameter
    shard: Shard | None
    partial: bool
    counted: bool
    """True if sums over all ranks count its elements on this rank."""
    place: MeshCoordinates
    """Place of this process in the mesh."""

    @property
    def distributed(self) -> bool:
        """True for experts that are distributed over ranks."""
        return self.shard is not None and self.shard.expert_parts > 1

    def box(self) -> Box:
        """Return the place of its elements in the whole parameter."""
        if self.shard is None:
            return Box.whole(tuple(self.parameter.shape))
        return self.shard.box(self.place.tp, self.place.ep)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        return tuple(self.parameter.shape) if self.shard is None else self.shard.shape

    def piece(self, tensor: torch.Tensor) -> torch.Tensor | Piece:
        """Return a tensor of the parameter's local shape as a checkpoint takes it."""
        return tensor if self.shard is None else Piece(tensor, self.shape, self.box())


def lay_out(
    builder: ModelBuilder,
    place: MeshCoordinates,
    config: ResolvedConfig,
    precision: PrecisionPolicy,
    adapters: Sequence[Adapter] = (),
    *,
    fixed_shapes: bool = False,
) -> Stage:
    """Build this rank's stages on the meta device; no other process is asked.

    Args:
        builder: of the model.
        place: of this rank.
        config: of the run.
        precision: its dtypes.
        adapters: in the order in which they change the model.
        fixed_shapes: whether the device compiles a graph for each shape.

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
        let_take_step(module)
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
    for name, held in parameters_of(stage, place).items():
        parameter, shard = held.parameter, held.shard
        if not held.counted:
            parameter.shared = True  # type: ignore[attr-defined]  # the library's norms count its elements elsewhere
        if shard is not None and place.sizes.tp > 1 and not hasattr(parameter, "tensor_model_parallel"):
            # Memory has been given to them, which drops attributes.
            set_tensor_model_parallel_attributes(parameter, True, shard.dim, 1, num_partitions=shard.parts)
        if held.distributed:
            parameter.expert_model_parallel = True  # type: ignore[attr-defined]
        if base or name in stage.added:
            draw_piece(Piece(held.parameter, held.shape, held.box()), name, stage.rules, seed=seed)


def round_to(stage: Stage, dtype: torch.dtype) -> None:
    """Round the parameters, of which masters have been taken, to the dtype that is computed with."""
    for parameter in stage.named_parameters().values():
        parameter.data = parameter.data.to(dtype)
    for part in (part for module in stage.modules for part in module.modules()):
        if isinstance(part, ParallelEmbedding):  # its outputs have this dtype
            part.dtype = dtype


def parameters_of(stage: Stage, place: MeshCoordinates) -> dict[str, LocalParameter]:
    """Return this rank's parameters by global name; a tied one goes by its owner's name."""
    parameters, local = stage.named_parameters(), {}
    owner_of = {user: owner for owner, user in stage.plan.tied}
    for path, parameter in parameters.items():
        name = owner_of.get(path, path)
        if name != path and name in parameters:
            continue  # the same parameter as its owner, which is here
        shard = stage.shards.get(path)
        local[name] = LocalParameter(
            parameter=parameter,
            shard=shard,
            partial=path in stage.partial,
            counted=name == path and (shard is None or place.tp % shard.copies == 0),
            place=place,
        )
    return local


_SALT_BITS = 62


def _place_dropouts(module: nn.Module, plan: ParallelPlan, place: MeshCoordinates, *, sequence_parallel: bool) -> None:
    """Fill the slots of the modules of a stage that draw masks (:mod:`nxdt_core.models.random.dropout`).

    Under ``sequence_parallel`` activations outside the tensor blocks are parts of the sequence. A single process has no
    salts.
    """
    blocks, tensor_part = paths_of(module, plan.tensor_blocks), (place.tp, place.sizes.tp)
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
