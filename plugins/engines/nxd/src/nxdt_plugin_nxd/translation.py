"""Translation of a model's plan into the modules of tensor and expert parallelism. The library is not needed.

Inside a tensor block (``ParallelPlan.tensor_blocks``) activations are whole and their gradients are partial sums over
the ranks; outside, both are whole and equal on all ranks, or under sequence parallelism parts of the sequence. From
this follows whose gradients are summed: those of parameters that every rank holds inside of a block, and under
sequence parallelism of all that every rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from nxdt_core.errors.launch import HeadsDoNotDivide, ShardDoesNotDivide
from nxdt_core.errors.layouts import ExpertsDoNotDivide
from nxdt_core.models.patterns import matches, matches_any, modules_at, style_of
from nxdt_core.models.updates import Update, UpdatedLinear
from nxdt_core.protocols.mesh import MeshSizes
from nxdt_core.protocols.plan import ParallelPlan, TensorStyle
from nxdt_core.protocols.tensor_shards import TensorSlice
from nxdt_plugin_nxd.errors import PlanNotExpressible

_SHARDED: tuple[TensorStyle, ...] = ("column", "row", "vocab_embedding", "vocab_head")
"""Styles of modules that are replaced by the library's."""
_EXPERT_DIM = {"column": 1, "row": 2}
"""Sharded dimension of matrices [experts, out, in]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Division of a parameter among the tensor parallel ranks, and of experts among the expert parallel ones."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dim: int
    parts: int
    """Different parts; fewer than ranks where neighbouring ranks hold copies."""
    copies: int = 1
    """Ranks that hold the same part."""
    expert_parts: int = 1
    """Parts along the first dimension, which numbers experts."""

    def region(self, rank: int, expert_rank: int = 0) -> TensorSlice:
        """Return the place of a tensor parallel rank's elements in the whole parameter; experts also depend on the
        expert parallel rank."""
        offsets, shape = [0] * len(self.shape), list(self.shape)
        for dim, parts, part in (
            (self.dim, self.parts, rank // self.copies),
            (0, self.expert_parts, expert_rank % self.expert_parts),
        ):
            if parts > 1:
                shape[dim] //= parts
                offsets[dim] = part * shape[dim]
        return TensorSlice(tuple(offsets), tuple(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A module that is replaced."""

    path: str
    style: TensorStyle
    """``replicate`` is a whole table that looks up this rank's part of the sequence."""
    copies: int = 1
    """Ranks that hold the same part, of key and value heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """Translation of the plan for one pipeline stage."""

    replacements: tuple[Replacement, ...] = ()
    blocks: tuple[str, ...] = ()
    """Paths of the tensor blocks, at whose entry the gradient of the hidden states is summed."""
    shards: Mapping[str, Shard]
    """Shards by the parameter's path; one that is absent is whole on each rank."""
    partial: frozenset[str] = frozenset()
    """Parameters that every rank holds and whose gradient is a partial sum."""
    dispatchers: tuple[str, ...]
    routers: tuple[str, ...] = ()


def translate(
    module: nn.Module, plan: ParallelPlan, *, tp: int, ep: int = 1, sequence_parallel: bool = False
) -> Translation:
    """Return what becomes of a pipeline stage over tensor or expert parallel ranks, or both.

    ``module`` is one stage, on the meta device. With ``sequence_parallel``, activations between tensor blocks are parts
    of the sequence.

    Raises:
        PlanNotExpressible: the plan asks for something that the engine does not do.
        ShardDoesNotDivide, HeadsDoNotDivide, ExpertsDoNotDivide: sizes that the ranks cannot share in equal parts.
    """
    refused = partial(PlanNotExpressible, model=type(module).__name__)

    def shard(name: str, parameter: nn.Parameter, dim: int, copies: int = 1) -> Shard:
        size, parts = parameter.shape[dim], tp // copies
        if size % parts:
            raise ShardDoesNotDivide(module=name, size=size, features=f"elements along dimension {dim}", tp=parts)
        return Shard(shape=tuple(parameter.shape), dim=dim, parts=parts, copies=copies)

    # Experts: whole ones over expert parallel ranks, and the matrices of each over tensor parallel ones.
    experts: dict[str, Shard] = {}
    for path, stack in modules_at(module, plan.experts.modules).items():
        for leaf, parameter in stack.named_parameters():
            name = f"{path}.{leaf}"
            if len(parameter) % ep:
                raise ExpertsDoNotDivide(module=path, experts=len(parameter), ep=ep)
            part = Shard(shape=tuple(parameter.shape), dim=0, parts=1)
            if tp > 1:
                side = next((side for pattern, side in plan.experts.tensor.items() if matches(pattern, name)), None)
                if side is None:
                    raise refused(problem=f"experts.tensor does not say how '{name}' is sharded")
                part = shard(name, parameter, _EXPERT_DIM[side])
            experts[name] = replace(part, expert_parts=ep)
    dispatchers = tuple(modules_at(module, plan.experts.dispatchers))
    if tp == 1:
        return Translation(shards=experts, dispatchers=dispatchers)

    blocks = modules_at(module, plan.tensor_blocks)
    for block in blocks:
        if is_within(block, [other for other in blocks if other != block]):
            raise refused(problem=f"the tensor block '{block}' is inside of another one")
    copies = 1  # ranks that hold the same key and value heads
    if plan.heads is not None:
        query, kv = plan.heads.query_heads, plan.heads.kv_heads
        if query % tp or (kv % tp and tp % kv):
            raise HeadsDoNotDivide(query_heads=query, kv_heads=kv, tp=tp, reason="")
        copies = max(1, tp // kv)

    # Modules that are replaced. Of a row the bias is whole, of a table for positions everything; an update of an
    # adapter is sharded along the layer's dimension.
    styled: list[tuple[str, nn.Module, TensorStyle]] = []
    for path, layer in module.named_modules(remove_duplicate=False):
        if (style := style_of(plan, path)) is not None and not isinstance(layer, nn.Identity):
            styled.append((path, layer, style))
    replacements: list[Replacement] = []
    shards: dict[str, Shard] = {}
    for path, layer, style in styled:
        kinds = (nn.Embedding,) if style == "vocab_embedding" else (nn.Linear, UpdatedLinear)
        if style == "replicate":
            if not (isinstance(layer, nn.Embedding) and sequence_parallel):
                continue
        elif style not in _SHARDED:
            raise refused(problem=f"'{path}' has the style {style}")
        elif type(layer) not in kinds:
            raise refused(problem=f"'{path}' is {type(layer).__name__}, not {kinds[0].__name__}")
        repeated = copies if plan.heads is not None and matches_any(plan.heads.key_value, path) else 1
        replacements.append(Replacement(path=path, style=style, copies=repeated))
        dim, update = 1 if style == "row" else 0, getattr(layer, "update", None)
        if style != "replicate":
            for leaf, parameter in layer.named_parameters(recurse=False):
                if dim < parameter.ndim:
                    shards[f"{path}.{leaf}"] = shard(f"{path}.{leaf}", parameter, dim, repeated)
            if isinstance(update, Update):
                for leaf, parameter in update.named_parameters():
                    if update.sharded_like.get(leaf) == dim:
                        name = f"{path}.update.{leaf}"
                        shards[name] = shard(name, parameter, dim, repeated)
        if not isinstance(layer, nn.Embedding) and not is_within(path, blocks):
            raise refused(problem=f"'{path}' is sharded, and no pattern of tensor_blocks is around it")
    shards |= experts
    replaced = {replacement.path for replacement in replacements}
    for path, layer in module.named_modules() if sequence_parallel else ():  # the sequence is divided at embeddings
        if isinstance(layer, nn.Embedding) and not is_within(path, blocks) and path not in replaced:
            raise refused(problem=f"sequence parallelism needs a style for the embedding '{path}'")

    # Parameters that every rank holds: in a block before the sum over ranks, or seeing a part of the sequence.
    rows = [path for path, _, style in styled if style == "row"]
    whole = [path for path, _, style in styled if style == "replicate"]
    summed = set()
    for name, _ in module.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        after_sum = owner in rows or is_within(owner, whole)
        if name not in shards and (sequence_parallel or (is_within(owner, blocks) and not after_sum)):
            summed.add(name)
    return Translation(
        replacements=tuple(replacements),
        blocks=tuple(blocks),
        shards=shards,
        partial=frozenset(summed),
        dispatchers=dispatchers,
        routers=tuple(modules_at(module, plan.experts.routers)),
    )


def is_within(path: str, modules: Iterable[str]) -> bool:
    """Return whether a path is one of ``modules`` or inside of one."""
    return any(path == outer or path.startswith(f"{outer}.") for outer in modules)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCoordinates:
    """This process's index along each dimension."""

    sizes: MeshSizes
    tp: int
    dp: int
    pp: int

    @classmethod
    def of(cls, rank: int, sizes: MeshSizes) -> MeshCoordinates:
        """Return the place of a rank, as data loading and checkpoints assume it."""
        rest, tp = divmod(rank, sizes.tp)
        pp, dp = divmod(rest, sizes.dp)
        return cls(sizes=sizes, tp=tp, dp=dp, pp=pp)

    @property
    def ep(self) -> int:
        """Return the index among the ranks that share the experts: neighbours along the data parallel ranks."""
        return self.dp % self.sizes.ep

    @property
    def expert_dp(self) -> int:
        """Return the index among the ranks that hold the same experts."""
        return self.dp // self.sizes.ep

    def as_dict(self) -> dict[str, int]:
        """Return the index by the name of the dimension."""
        return {"tp": self.tp, "dp": self.dp, "pp": self.pp, "ep": self.ep}
