"""Tensor and sequence parallelism by a model's plan, on plain modules.

Inside a tensor block (``ParallelPlan.tensor_blocks``) activations are whole and their gradients are partial sums over
the ranks; outside, activations and gradients are whole and equal on all ranks, or under sequence parallelism both are
this rank's part of the sequence. From this follows whose gradients are summed: :func:`partial_parameters`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from nxdt_core.distributed.placement import sharded_over
from nxdt_core.engine.mesh import ParallelMesh
from nxdt_core.engine.tensor.gathered_again import entering_block
from nxdt_core.engine.tensor.heads import HeadLayout
from nxdt_core.engine.tensor.layers import BlockEntry
from nxdt_core.engine.tensor.shards import TensorSharder
from nxdt_core.errors.launch import TensorPlanUnusable
from nxdt_core.models.patterns import matches, matches_any
from nxdt_core.protocols.plan import ParallelPlan, TensorStyle

__all__ = ["apply_tensor_parallel", "gather_once", "partial_parameters", "replicated_partials"]

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


def apply_tensor_parallel(
    module: nn.Module,
    plan: ParallelPlan,
    mesh: ParallelMesh,
    *,
    sequence_parallel: bool,
    gathers_again: bool = False,
    pad_heads: bool = False,
) -> None:
    """Replace, in place, the modules that ``plan.tensor`` names by sharded ones under the same names.

    Collective: every rank of every pipeline stage calls it. With one tensor-parallel rank nothing changes.

    Args:
        module: one pipeline stage, mostly on the meta device; values of a real one are kept.
        plan: patterns that match nothing here belong to other stages.
        mesh: of the run.
        sequence_parallel: cut activations outside the tensor blocks along the sequence.
        gathers_again: with ``sequence_parallel``, keep parts of the sequence for backward and gather them again there;
            layers keep them once :func:`nxdt_core.engine.recompute.drop_in_layers` was called.
        pad_heads: fill up with heads of zeros what the ranks cannot share in equal parts; see
            :func:`nxdt_core.engine.tensor.heads.padded_parameters`.

    Raises:
        HeadsDoNotDivide, ShardDoesNotDivide: sizes that the ranks cannot share in equal parts.
        TensorPlanUnusable: a module that its style cannot shard, or one in no tensor block.
    """
    group = mesh.group("tp")
    if group is None:
        return
    heads = None if plan.heads is None else HeadLayout.of(plan.heads, mesh.size("tp"), pad=pad_heads)
    if heads is not None and heads.kv_replicas > 1:
        mesh.split_tp(heads.padded_kv_heads)
    blocks = _blocks(module, plan)
    if sequence_parallel:
        _check_sequence_parallel(module, plan, blocks)
    sharder = TensorSharder(plan, mesh, heads, sequence_parallel=sequence_parallel)
    styles = dict(_styled(module, plan))
    for path, style in styles.items():
        if style in _IN_BLOCKS and not any(_inside(path, block) for block in blocks):
            raise TensorPlanUnusable(problem=f"'{path}' is {style}, and no pattern of tensor_blocks is around it")
        replacement = sharder.replacement(path, module.get_submodule(path), style)
        if replacement is not None:
            module.set_submodule(path, replacement)
    routers = [
        path for path, _ in module.named_modules() if matches_any((*plan.experts.routers, *plan.experts.modules), path)
    ]
    for block in blocks:
        if styles.get(block) != "row":  # whose inputs are its own part of the features
            routes = any(_inside(path, block) for path in routers)
            # A block that is one matrix, such as the head, has nothing to hide a gather behind.
            again = sequence_parallel and gathers_again and block not in styles
            entry = BlockEntry(group, sequence_parallel=sequence_parallel, routes=routes, again=again)
            part: Any = module.get_submodule(block)
            if again:
                kind: Any = type(part)
                part.entry, part.__class__ = entry, entering_block(kind)
            else:
                part.register_forward_pre_hook(entry)


def gather_once(parts: Iterable[nn.Module]) -> None:
    """Let tensor blocks among ``parts`` keep what they gathered: they are recomputed, and gather again anyway."""
    for part in parts:
        entry = getattr(part, "entry", None)
        if isinstance(entry, BlockEntry):
            entry.again = False


def partial_parameters(module: nn.Module, plan: ParallelPlan, *, sequence_parallel: bool) -> frozenset[str]:
    """Return the names of parameters whose gradients are partial sums over ``tp``, after :func:`apply_tensor_parallel`.

    Those that tensor parallelism does not shard, where they are in a tensor block or are of the update of a vocabulary
    embedding (except what comes after a ``row``'s sum: its bias, and ``replicate`` modules), or anywhere under sequence
    parallelism.
    """
    styles = dict(_styled(module, plan))
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


def replicated_partials(module: nn.Module) -> frozenset[str]:
    """Return the names of key and value parameters whose gradients are partial sums over ``tp_kv_replica``: each copy
    serves other query heads."""
    return frozenset(
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if "tp_kv" in sharded_over(parameter)
    )


def _check_sequence_parallel(module: nn.Module, plan: ParallelPlan, blocks: list[str]) -> None:
    """The sequence is cut at the embeddings and made whole again at the head."""
    styled = dict(_styled(module, plan))
    gathering = any(styled.get(block) in ("column", "column_whole") for block in blocks)
    if "vocab_head" not in plan.tensor.values() and not gathering:
        raise TensorPlanUnusable(problem="sequence parallelism needs a vocab_head, whose logits are whole sequences")
    for path, part in module.named_modules():
        outside = not any(_inside(path, block) for block in blocks)
        if isinstance(part, nn.Embedding) and outside and path not in styled:
            raise TensorPlanUnusable(
                problem=f"sequence parallelism needs a style for the embedding '{path}': vocab_embedding or replicate"
            )


def _styled(module: nn.Module, plan: ParallelPlan) -> Iterator[tuple[str, TensorStyle]]:
    """Paths that a pattern of ``plan.tensor`` matches, but for the placeholders of other stages."""
    for path, part in module.named_modules(remove_duplicate=False):
        style = next((style for pattern, style in plan.tensor.items() if matches(pattern, path)), None)
        if style is not None and not isinstance(part, nn.Identity):
            yield path, style


def _blocks(module: nn.Module, plan: ParallelPlan) -> list[str]:
    """Paths of the tensor blocks, none inside another."""
    blocks = [
        path
        for path, part in module.named_modules()
        if matches_any(plan.tensor_blocks, path) and not isinstance(part, nn.Identity)
    ]
    for block in blocks:
        outer = next((other for other in blocks if other != block and _inside(block, other)), None)
        if outer is not None:
            raise TensorPlanUnusable(problem=f"the tensor block '{block}' is inside the tensor block '{outer}'")
    return blocks


def _inside(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.")
