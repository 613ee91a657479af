"""The choice of pipeline cuts where the configuration names none: the longest rank is as short as possible.

The head of a large vocabulary costs as much as several layers, and the embedding is only looked up. With equally many
layers per stage all ranks would wait for the last one in every micro-batch.

Costs are those of the estimate: operations of one training token. They follow from the shapes of the whole model and
the configuration alone, so that all ranks find the same cuts without asking each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from os.path import commonpath
from typing import Any

from torch import nn

from nxdt_core.engine.pipeline.schedules import Operation, schedule_operations, step_length
from nxdt_core.errors.layouts import FewerLayersThanStages
from nxdt_core.models.patterns import matches_any
from nxdt_core.protocols.mesh import MeshSizes, rank_of_stage
from nxdt_core.protocols.plan import ParallelPlan

_TRAINED, _FROZEN = 6, 4
"""Operations per weight and token: two in forward, two for the gradient of the input, two for that of the weight."""
_ONCE, _TWICE = 3, 4
"""Products in forward and backward, without and with forward repeated in backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCosts:
    """Operations of the parts that cuts can separate, in one unit. Integers, so that equal costs compare as equal."""

    layers: Mapping[str, int]
    """Cost of each layer by its name, in order."""
    first: int = 0
    """Cost of what runs before the layers."""
    last: int = 0
    """Cost of what runs after the layers, and of the loss."""


def counted_costs(
    whole: nn.Module,
    plan: ParallelPlan,
    *,
    attention: float,
    seq_length: int,
    recomputes_layers: bool = False,
    recomputes_head: bool = False,
) -> PartCosts:
    """Count the operations of a whole model by part.

    Args:
        whole: with adapters, not sharded.
        plan: its ``pipeline`` must be set.
        attention: operations of all attention cores per token, divided among them by the tokens that each attends to.
        seq_length: tokens of a sequence.
        recomputes_layers: whether backward repeats the forward of each layer.
        recomputes_head: whether backward repeats that of the head.
    """
    assert plan.pipeline is not None
    names = [f"{plan.pipeline.layers}.{key}" for key, _ in whole.get_submodule(plan.pipeline.layers).named_children()]
    work = _products(whole, plan)
    work.update(_attention(whole, plan, attention, seq_length))
    parts: Counter[str] = Counter()
    for path, operations in work.items():
        parts[_part_of(path, plan, names)] += operations
    return PartCosts(
        layers={name: round(parts[name]) * (_TWICE if recomputes_layers else _ONCE) for name in names},
        first=round(parts[_FIRST]) * _ONCE,
        last=round(parts[_LAST]) * (_TWICE if recomputes_head else _ONCE),
    )


_FIRST, _LAST, _EVERYWHERE = "<first>", "<last>", "<everywhere>"


def _part_of(path: str, plan: ParallelPlan, layers: Sequence[str]) -> str:
    assert plan.pipeline is not None
    parts = path.split(".")
    name = ".".join(parts[: plan.pipeline.layers.count(".") + 2])
    if name in layers:
        return name
    for part, modules in ((_FIRST, plan.pipeline.first), (_LAST, plan.pipeline.last)):
        if any(f"{path}.".startswith(f"{module}.") for module in modules):
            return part
    return _EVERYWHERE


def _products(whole: nn.Module, plan: ParallelPlan) -> Counter[str]:
    """Operations of matrix products by module, of a token; experts count as far as it is sent to them."""
    modules = dict(whole.named_modules())
    chosen = {
        path: int(part.top_k)
        for path, part in modules.items()
        if matches_any(plan.experts.routers, path) and hasattr(part, "top_k")
    }
    work: Counter[str] = Counter()
    for path, module in modules.items():
        if isinstance(module, nn.Embedding):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.ndim < 2:
                continue
            elements = parameter.numel()
            if matches_any(plan.experts.modules, path):
                elements = elements * _top_k(path, chosen) // parameter.shape[0]
            work[path] += elements * (_TRAINED if parameter.requires_grad else _FROZEN)
    return work


def _top_k(experts: str, chosen: Mapping[str, int]) -> int:
    """Return how many experts a token goes to, by the router that is nearest to them in the tree of modules."""
    nearest = max(chosen, key=lambda path: len(commonpath([_as_file(path), _as_file(experts)])), default=None)
    return 1 if nearest is None else chosen[nearest]


def _as_file(path: str) -> str:
    return "/" + path.replace(".", "/")


def _attention(whole: nn.Module, plan: ParallelPlan, operations: float, seq_length: int) -> dict[str, int]:
    seen = {
        path: min(_window(part) or seq_length, seq_length)
        for path, part in whole.named_modules()
        if matches_any(plan.attention_cores, path)
    }
    return {path: round(operations * tokens / sum(seen.values())) for path, tokens in seen.items()}


def _window(core: nn.Module) -> int | None:
    """The tokens that a token's scores are computed with; with a cap, all are, and a window hides some."""
    semantics = getattr(core, "semantics", None)
    attention = None if semantics is None else semantics()
    return None if getattr(attention, "softcap", None) is not None else getattr(attention, "window", None)


def choose_cuts(costs: PartCosts, sizes: MeshSizes, *, micro_batches: int) -> tuple[str, ...]:
    """Return the names of the last layer of each stage but the final one.

    Equally many layers per stage are kept where nothing else makes the step shorter. Between cuts that are equally
    fast, those are chosen that keep the fewest activations on the fullest rank.

    Args:
        costs: operations of each layer and of what is around the layers.
        sizes: the mesh, with more than one stage.
        micro_batches: number per step and rank.

    Raises:
        FewerLayersThanStages: a stage would have no layer.
    """
    names, stages = list(costs.layers), sizes.stages
    if len(names) < stages:
        raise FewerLayersThanStages(layers=len(names), stages=stages)
    orders = schedule_operations(sizes.schedule, sizes.pp, sizes.vpp, micro_batches)
    ranks = [rank_of_stage(stage, sizes.pp, sizes.schedule) for stage in range(stages)]
    ends = _descend(_shortest(costs, stages), costs, ranks, _in_flight(orders, stages))
    size, rest = divmod(len(names), stages)
    even = [size * (stage + 1) for stage in range(stages)]
    # A shorter longest rank can still make a longer step where there are few micro-batches.
    if not rest and _length(even, costs, orders) <= _length(ends, costs, orders):
        ends = even
    return tuple(names[end - 1] for end in ends[:-1])


def stage_costs(costs: PartCosts, layers: Sequence[Sequence[str]]) -> list[int]:
    """Return the cost of each stage, from the layers of each."""
    totals = [sum(costs.layers[name] for name in stage) for stage in layers]
    totals[0] += costs.first
    totals[-1] += costs.last
    return totals


def _of_stages(ends: Sequence[int], costs: PartCosts) -> list[int]:
    names = list(costs.layers)
    return stage_costs(costs, [names[begin:end] for begin, end in zip([0, *ends], ends, strict=False)])


def _length(ends: Sequence[int], costs: PartCosts, orders: Sequence[Sequence[Operation]]) -> float:
    return step_length(orders, _of_stages(ends, costs))


def _shortest(costs: PartCosts, stages: int) -> list[int]:
    """Return where stages end such that the longest is as short as possible: exact, by dynamic programming over the
    layers. Every stage has a layer, the last one need not."""
    sums = [0, *accumulate(costs.layers.values())]
    count = len(sums) - 1
    best = [costs.first + done for done in sums]  # the longest of the first stage alone, by the layers that are done
    choices = []
    for stage in range(1, stages):
        final = stage == stages - 1
        extra, least = (costs.last, 0) if final else (0, 1)
        longest, choice = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(stage + least, count + 1):
            for begin in range(end - least, stage - 1, -1):
                cost = sums[end] - sums[begin] + extra
                if cost >= longest[end]:
                    break  # it only grows with more layers
                if max(cost, best[begin]) < longest[end]:
                    longest[end], choice[end] = max(cost, best[begin]), begin
        best = longest  # type: ignore[assignment]
        choices.append(choice)
    ends = [count]
    for choice in reversed(choices):
        ends.append(choice[ends[-1]])
    return ends[::-1]


def _in_flight(orders: Sequence[Sequence[Operation]], stages: int) -> list[int]:
    """Return how many micro-batches' activations each stage keeps at most."""
    now, most = Counter[int](), [0] * stages
    for order in orders:
        for operation in order:
            if operation.kind == "forward":
                now[operation.stage] += 1
                most[operation.stage] = max(most[operation.stage], now[operation.stage])
            elif operation.kind != "backward_input":
                now[operation.stage] -= 1
    return most


def _descend(ends: list[int], costs: PartCosts, ranks: Sequence[int], in_flight: Sequence[int]) -> list[int]:
    """Move one layer at a time from one stage to another while that shortens ranks, or frees memory of equal ones.

    Where each rank has one stage, the longest is the shortest possible already; where it has several, their sums count,
    and moves reach the best one if layers are equal.
    """
    sums = [0, *accumulate(costs.layers.values())]

    def rating(ends: Sequence[int]) -> Any:
        stages, load, memory = _of_stages(ends, costs), Counter[int](), Counter[int]()
        for stage, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            load[ranks[stage]] += stages[stage]
            memory[ranks[stage]] += (sums[end] - sums[begin]) * in_flight[stage]
        return sorted(load.values(), reverse=True), max(stages), max(memory.values()), sum(memory.values())

    rated = rating(ends)
    while True:
        tried = [(rating(moved), moved) for moved in _moves(ends)]
        best = min(tried, default=(rated, ends))
        if best[0] >= rated:
            return ends
        rated, ends = best


def _moves(ends: Sequence[int]) -> list[list[int]]:
    """Return the ends after each move of one layer between two stages: the cuts between them move by one."""
    last, moves = len(ends) - 1, []
    for begin in range(last):
        for end in range(begin + 1, last + 1):
            for step in (-1, 1):
                moved = [cut + step if begin <= place < end else cut for place, cut in enumerate(ends)]
                inner = [0, *moved[:-1]]
                if all(a < b for a, b in pairwise(inner)) and inner[-1] <= moved[-1]:
                    moves.append(moved)
    return moves
