"""Tensor and sequence parallelism by a model's plan: each ``torch.nn`` module is replaced by a sharded one.

Inside a tensor block (``ParallelPlan.tensor_blocks``), activations are whole and their gradients are partial sums over
the ranks. Outside, activations and gradients are whole and equal on all ranks, or both are this rank's part of the
sequence under sequence parallelism. :func:`partial_parameters` follows from this: the gradients that are summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nxdt_core.distributed.collectives import gather_whole, reduce_from_group
from nxdt_core.distributed.placement import shard_over_mesh, sharded_over
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.recompute import enter_within
from nxdt_core.engine.tensor.layers import (
    SEQUENCE_DIM,
    BlockEntry,
    ColumnParallelLinear,
    FeatureShard,
    GatheredColumnLinear,
    HeadSharding,
    PaddedDim,
    PartialRowLinear,
    RowParallelLinear,
    SequenceParallelEmbedding,
    SplitRowLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    local_part,
)
from nxdt_core.errors.launch import ShardDoesNotDivide, TensorPlanUnusable
from nxdt_core.models.patterns import matches_any, modules_at, style_of
from nxdt_core.models.random.dropout import Dropout
from nxdt_core.models.updates import Update, UpdatedEmbedding, UpdatedLinear
from nxdt_core.protocols.plan import ParallelPlan, TensorStyle

_IN_BLOCKS: tuple[TensorStyle, ...] = (
    "column",
    "column_gathered",
    "column_whole",
    "row",
    "row_split",
    "row_partial",
    "heads",
    "channels",
    "vocab_head",
)
"""Styles of modules that are inside a tensor block."""


_ROWS: Mapping[TensorStyle, type[RowParallelLinear]] = {
    "row": RowParallelLinear,
    "row_split": SplitRowLinear,
    "row_partial": PartialRowLinear,
}


def apply_tensor_parallel(
    module: nn.Module,
    plan: ParallelPlan,
    mesh: ParallelMesh,
    *,
    sequence_parallel: bool,
    regathers: bool = False,
    pad_heads: bool = False,
) -> None:
    """Replace the modules that ``plan.tensor`` names by sharded ones under the same names, in place.

    Collective: every rank of every pipeline stage calls it. With one tensor-parallel rank nothing changes.

    Args:
        module: one pipeline stage, mostly on the meta device; values of a real one are kept.
        plan: patterns that match nothing here belong to other stages.
        mesh: its ``tp`` ranks share the modules.
        sequence_parallel: cut activations outside the tensor blocks along the sequence.
        regathers: with ``sequence_parallel``, keep parts of the sequence for backward and gather them again there;
            layers keep them once :func:`nxdt_core.engine.recompute.discard_in_layers` was called.
        pad_heads: fill up with heads of zeros what the ranks cannot share in equal parts; see
            :func:`nxdt_core.engine.tensor.layers.padded_parameters`.

    Raises:
        HeadsDoNotDivide, ShardDoesNotDivide: sizes that the ranks cannot share in equal parts.
        TensorPlanUnusable: a module that its style cannot shard, or one in no tensor block.
    """
    group = mesh.group("tp")
    if group is None:
        return
    heads = None if plan.heads is None else HeadSharding.of(plan.heads, mesh.size("tp"), pad=pad_heads)
    if heads is not None and heads.kv_replicas > 1:
        mesh.split_tp(heads.padded_kv_heads)
    blocks = _blocks(module, plan)
    if sequence_parallel:
        _check_sequence_parallel(module, plan, blocks)
    sharder = TensorSharder(plan=plan, mesh=mesh, group=group, heads=heads, sequence_parallel=sequence_parallel)
    styles = _styled(module, plan)
    for path, style in styles.items():
        if style in _IN_BLOCKS and not any(_inside(path, block) for block in blocks):
            raise TensorPlanUnusable(problem=f"'{path}' is {style}, and no pattern of tensor_blocks is around it")
        replacement = sharder.replacement(path, module.get_submodule(path), style)
        if replacement is not None:
            module.set_submodule(path, replacement)
    routers = modules_at(module, (*plan.experts.routers, *plan.experts.modules))
    for block in blocks:
        if styles.get(block) != "row":  # whose inputs are its own part of the features
            routes = any(_inside(path, block) for path in routers)
            # A block that is one matrix, such as the head, has nothing to hide a gather behind.
            again = sequence_parallel and regathers and block not in styles
            entry = BlockEntry(group, sequence_parallel=sequence_parallel, routes=routes, again=again)
            part = module.get_submodule(block)
            if again:
                enter_within(part, entry)
            else:
                part.register_forward_pre_hook(entry)


def partial_parameters(module: nn.Module, plan: ParallelPlan, *, sequence_parallel: bool) -> frozenset[str]:
    """Return the names of parameters whose gradients are partial sums over ``tp``, after :func:`apply_tensor_parallel`.

    Those that tensor parallelism does not shard, where they are in a tensor block or are of the update of a vocabulary
    embedding (except what comes after a ``row``'s sum: its bias, and ``replicate`` modules), or anywhere under sequence
    parallelism.
    """
    styles = _styled(module, plan)
    partials = [*_blocks(module, plan), *(f"{p}.update" for p, style in styles.items() if style == "vocab_embedding")]
    rows = {path for path, style in styles.items() if style in ("row", "row_split")}
    replicated = [path for path, style in styles.items() if style == "replicate"]

    def partial(name: str) -> bool:
        if sequence_parallel:
            return True
        owner = name.rpartition(".")[0]
        after_sum = owner in rows or any(_inside(owner, path) for path in replicated)
        return not after_sum and any(_inside(owner, path) for path in partials)

    return frozenset(
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if not sharded_over(parameter) & {"tp", "tp_kv"} and partial(name)
    )


def _check_sequence_parallel(module: nn.Module, plan: ParallelPlan, blocks: list[str]) -> None:
    """Check that the sequence is sharded at the embeddings and gathered at the head."""
    styled = _styled(module, plan)
    gathering = any(styled.get(block) in ("column", "column_whole") for block in blocks)
    if not {"vocab_head", "score_head"} & {*plan.tensor.values()} and not gathering:
        raise TensorPlanUnusable(problem="sequence parallelism needs a vocab_head, whose logits are whole sequences")
    for path, part in module.named_modules():
        outside = not any(_inside(path, block) for block in blocks)
        if isinstance(part, nn.Embedding) and outside and path not in styled:
            raise TensorPlanUnusable(
                problem=f"sequence parallelism needs a style for the embedding '{path}': vocab_embedding or replicate"
            )


def _styled(module: nn.Module, plan: ParallelPlan) -> dict[str, TensorStyle]:
    """Return the style of each path that a pattern of ``plan.tensor`` matches, placeholders of other stages left out;
    a module that is shared has several paths."""
    styles = {
        path: style_of(plan, path)
        for path, part in module.named_modules(remove_duplicate=False)
        if not isinstance(part, nn.Identity)
    }
    return {path: style for path, style in styles.items() if style is not None}


def _blocks(module: nn.Module, plan: ParallelPlan) -> list[str]:
    """Return the paths of the tensor blocks, none inside another."""
    blocks = [*modules_at(module, plan.tensor_blocks)]
    for block in blocks:
        outer = next((other for other in blocks if other != block and _inside(block, other)), None)
        if outer is not None:
            raise TensorPlanUnusable(problem=f"the tensor block '{block}' is inside the tensor block '{outer}'")
    return blocks


def _inside(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardedDim:
    """Sharding of one dimension of a parameter over the ranks."""

    spread: PaddedDim
    mesh: DeviceMesh
    copied: bool
    """The second dimension of ``mesh`` holds copies."""
    part: int
    """Number of this rank's part."""

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's part: real elements, then zeros."""
        spread, source = self.spread, parameter.detach()
        shape = [*source.shape]
        shape[spread.dim] = spread.block
        part, count = source.new_zeros(shape), spread.counts[self.part]
        part.narrow(spread.dim, 0, count).copy_(source.narrow(spread.dim, spread.starts[self.part], count))
        return part


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSharder:
    """Shards the modules of one pipeline stage; parameters that were one (tied) stay one."""

    plan: ParallelPlan
    mesh: ParallelMesh
    group: dist.ProcessGroup
    heads: HeadSharding | None
    sequence_parallel: bool
    sharded: dict[torch.Tensor, nn.Parameter] = field(default_factory=dict)

    def replacement(self, path: str, module: nn.Module, style: TensorStyle) -> nn.Module | None:
        """Return the module to put at ``path``; None where the existing one may stay."""
        if style == "score_head":
            if self.sequence_parallel:
                module.register_forward_hook(lambda _, args, scores: gather_whole(scores, SEQUENCE_DIM, self.group))
            return None
        if style == "replicate":
            if not self.sequence_parallel or not isinstance(module, nn.Embedding):
                return None
            table = _table(path, module, style)
            update = self._update(table, None)
            return SequenceParallelEmbedding(table.weight, self.group, padding_idx=table.padding_idx, update=update)
        if style == "vocab_embedding":
            table = _table(path, module, style)
            cut = self._even(path, 0, table.num_embeddings, "rows of the vocabulary")
            return VocabParallelEmbedding(
                self._shard(table.weight, cut),
                self.group,
                padding_idx=table.padding_idx,
                sequence_parallel=self.sequence_parallel,
                update=self._update(table, cut),
            )
        if style in ("heads", "channels"):
            return self._features_of(path, module, style)
        linear = _linear(path, module, style)
        return self._row(path, linear, style) if style in _ROWS else self._column(path, linear, style)

    def _column(self, path: str, linear: nn.Linear, style: TensorStyle) -> nn.Module:
        """Return the layer that has this rank's part of the output features, or of the rows of the vocabulary."""
        size, is_head = linear.out_features, not style.startswith("column")
        of_heads = self._of_heads(path, 0, size) if style == "column" else None
        cut = of_heads or self._even(path, 0, size, "rows of the vocabulary" if is_head else "output features")
        weight, update = self._shard(linear.weight, cut), self._update(linear, cut)
        bias = None if linear.bias is None else self._shard(linear.bias, cut)
        if is_head:
            return VocabParallelHead(weight, bias, cut.mesh, update=update)
        if style == "column":
            return ColumnParallelLinear(weight, bias, spread=cut.spread, part=cut.part, update=update)
        return GatheredColumnLinear(
            weight,
            bias,
            group=self.group,
            ends_block=style == "column_whole",
            spread=cut.spread,
            part=cut.part,
            update=update,
        )

    def _row(self, path: str, linear: nn.Linear, style: TensorStyle) -> RowParallelLinear:
        if style == "row_partial" and linear.bias is not None:
            raise TensorPlanUnusable(problem=f"'{path}' is {style} and has a bias, which each rank would add")
        size = linear.in_features
        of_heads = self._of_heads(path, 1, size) if style == "row" else None
        cut = of_heads or self._even(path, 1, size, "input features")
        return _ROWS[style](
            self._shard(linear.weight, cut),
            linear.bias,
            self.group,
            sequence_parallel=self.sequence_parallel,
            spread=cut.spread,
            update=self._update(linear, cut),
        )

    def _features_of(self, path: str, module: nn.Module, style: TensorStyle) -> FeatureShard:
        named, buffers = dict(module.named_parameters(recurse=False)), dict(module.named_buffers(recurse=False))
        sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in (*named.values(), *buffers.values())}
        if len(sizes) != 1 or len([*module.children()]):
            raise TensorPlanUnusable(
                problem=f"'{path}' is {style}, and has more than parameters and buffers of equal leading size"
            )
        saved = [name for name in buffers if name in module.state_dict(keep_vars=True)]
        if saved:
            raise TensorPlanUnusable(
                problem=f"'{path}' is {style}, and its buffer '{saved[0]}' would be saved: register it with"
                " persistent=False and compute it in reset_buffers(), or make it a parameter"
            )
        size = sizes.pop()
        cut = self._even(path, 0, size, "channels") if style == "channels" else self._of_heads(path, 0, size)
        if cut is None:
            raise TensorPlanUnusable(problem=f"'{path}' is heads, and AttentionHeads does not say of which")
        parameters = {name: self._shard(parameter, cut) for name, parameter in named.items()}
        return FeatureShard(module, parameters, cut.spread, cut.local)

    def _update(self, layer: nn.Module, cut: _ShardedDim | None) -> Update | None:
        """Return the update of ``layer``, sharded with it; ``cut`` None leaves it whole."""
        update: Update | None = getattr(layer, "update", None)
        if update is None or cut is None:
            return update
        for name, dim in update.sharded_like.items():
            if dim == cut.spread.dim:
                setattr(update, name, self._shard(getattr(update, name), cut))
        update.local = local_part
        for part in update.modules():
            if isinstance(part, Dropout):
                part.whole = cut.spread.dim == 0
                part.features = None if part.whole else (cut.spread.starts[cut.part], sum(cut.spread.counts))
        if cut.spread.dim == update.inputs:
            update.over_inputs = partial(reduce_from_group, group=self.group)
        return update

    def _even(self, path: str, dim: int, size: int, features: str) -> _ShardedDim:
        """Return the sharding into equal parts without padding."""
        tp = self.group.size()
        if size % tp:
            raise ShardDoesNotDivide(module=path, size=size, features=features, tp=tp)
        block = size // tp
        spread = PaddedDim.of(dim, block=block, starts=range(0, size, block), counts=[block] * tp, unit=1)
        return _ShardedDim(spread=spread, mesh=self.mesh.mesh("tp"), copied=False, part=self.group.rank())

    def _of_heads(self, path: str, dim: int, size: int) -> _ShardedDim | None:
        """Return the sharding by whole heads, where the plan says that the ``size`` features are heads."""
        heads, layout = self.plan.heads, self.heads
        if heads is None or layout is None:
            return None
        key_value = dim == 0 and matches_any(heads.key_value, path)
        if not key_value and not matches_any(heads.query if dim == 0 else heads.output, path):
            return None
        count = heads.kv_heads if key_value else heads.query_heads
        if size % count:
            raise TensorPlanUnusable(problem=f"'{path}' has {size} features, no multiple of {count} heads")
        if not key_value:
            spread = layout.query(dim, size // count)
            return _ShardedDim(spread=spread, mesh=self.mesh.mesh("tp"), copied=False, part=self.group.rank())
        spread, copied = layout.key_value(dim, size // count), layout.kv_replicas > 1
        mesh = self.mesh.mesh("tp_kv", "tp_kv_replica") if copied else self.mesh.mesh("tp")
        return _ShardedDim(spread=spread, mesh=mesh, copied=copied, part=self.group.rank() // layout.kv_replicas)

    def _shard(self, parameter: torch.Tensor, cut: _ShardedDim) -> nn.Parameter:
        replacement = self.sharded.get(parameter)
        if replacement is None:
            dims = (cut.spread.dim, None) if cut.copied else (cut.spread.dim,)
            sharded = shard_over_mesh(cut.local(parameter), cut.mesh, *dims)
            replacement = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
            self.sharded[parameter] = replacement
        return replacement


def _linear(path: str, module: nn.Module, style: TensorStyle) -> nn.Linear:
    if isinstance(module, nn.Linear) and type(module).forward in (nn.Linear.forward, UpdatedLinear.forward):
        return module
    raise TensorPlanUnusable(problem=f"'{path}' is {style} and no torch.nn.Linear, but {type(module).__name__}")


def _table(path: str, module: nn.Module, style: TensorStyle) -> nn.Embedding:
    supported = (nn.Embedding.forward, UpdatedEmbedding.forward)
    if not isinstance(module, nn.Embedding) or type(module).forward not in supported:
        raise TensorPlanUnusable(problem=f"'{path}' is {style} and no torch.nn.Embedding, but {type(module).__name__}")
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise TensorPlanUnusable(
            problem=f"the embedding '{path}' has max_norm, scale_grad_by_freq or sparse, which no shard can follow"
        )
    return module
