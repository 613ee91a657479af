"""Stock pipeline schedules by the names of the configuration: what they cost in idle time, and where to cut for them.

Where the configuration names no cuts, they are chosen such that the longest rank is as short as possible. The head of a
large vocabulary costs as much as several layers, and the embedding is only looked up. With equally many layers per
stage all ranks would wait for the last one in every micro-batch.

Costs are those of the estimate: operations of one training token. They follow from the shapes of the whole model and
the configuration alone, so that all ranks find the same cuts without asking each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, pairwise, product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from nxdt_core.errors.layouts import FewerLayersThanStages, MicroBatchesDoNotFit
from nxdt_core.protocols.mesh import MeshSizes, Schedule, rank_of_stage, stages_of_rank

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

    StockSchedule = Schedule1F1B | ScheduleInterleaved1F1B | ScheduleZBVZeroBubble


OperationKind = Literal["forward", "backward", "backward_input", "backward_weight"]
_KINDS: Mapping[str, OperationKind] = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
}
"""Kinds by the names of torch's enumeration, whose values are numbers before 2.10."""
_COST: Mapping[OperationKind, int] = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}
"""Matrix products of a linear layer: one forward, one for the gradient of its input, one for that of its weight."""


def micro_batches_fit(schedule: Schedule, pp: int, micro_batches: int) -> bool:
    """Return whether ``schedule`` over ``pp`` ranks can run so many micro-batches in a step.

    The stock 1F1B takes at least one per stage; the interleaved one works in rounds of equal size, of ``pp`` or more;
    ZBV takes any number. With few micro-batches, ranks mostly wait;
    :func:`bubble_fraction` computes for how much of a step.
    """
    if pp == 1 or schedule == "zbv":
        return micro_batches >= 1
    if schedule == "interleaved":
        return micro_batches >= 1 and micro_batches % max(1, micro_batches // pp) == 0
    return micro_batches >= pp


def check_micro_batches(schedule: Schedule, *, pp: int, micro_batches: int) -> None:
    """Refuse what the schedule cannot run.

    Raises:
        MicroBatchesDoNotFit: with the nearest number above that fits.
    """
    if not micro_batches_fit(schedule, pp, micro_batches):
        wants = {"1f1b": f"at least {pp}", "interleaved": f"rounds of one size, of {pp} or more,", "zbv": "at least 1"}
        example = next(number for number in count(micro_batches) if micro_batches_fit(schedule, pp, number))
        raise MicroBatchesDoNotFit(
            schedule=schedule, pp=pp, micro_batches=micro_batches, rule=wants[schedule], example=example
        )


def make_schedule(
    schedule: Schedule,
    stages: Sequence[PipelineStage],
    micro_batches: int,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
    *,
    gather_at_start: bool = True,
) -> StockSchedule:
    """Return the stock schedule over this rank's ``stages``.

    Gradients are summed over micro-batches, never divided: losses are shares of one global mean already, and stock's
    ``scale_grads=True`` divides twice where stages share a parameter.

    Args:
        schedule: name in the configuration.
        stages: this rank's, in ascending order.
        micro_batches: number per step.
        loss: of the last stage's output and the micro-batch's index.
        gather_at_start: False leaves gathering FSDP2's parameters to its hooks, layer by layer (ZeRO-3).
    """
    from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
    from torch.distributed.pipelining.schedules import UNSHARD

    if schedule == "1f1b":
        (stage,) = stages
        return Schedule1F1B(stage, micro_batches, loss, scale_grads=False)
    kind = ScheduleZBVZeroBubble if schedule == "zbv" else ScheduleInterleaved1F1B
    looped = kind(list(stages), micro_batches, loss, scale_grads=False)
    if not gather_at_start and hasattr(looped, "register_custom_function"):  # before 2.10, hooks alone gather
        looped.register_custom_function(
            UNSHARD, lambda action, context: cast(Any, context.schedule_ref).unsharded_stages.add(action.stage_index)
        )
    return looped


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a rank."""

    kind: OperationKind
    stage: int
    micro_batch: int


def schedule_operations(schedule: Schedule, pp: int, vpp: int, micro_batches: int) -> list[list[Operation]]:
    """Return what each pipeline rank computes in a step, in order; communication left out.

    From the list that the stock schedule itself executes. Its 1F1B has no such list (its ``pipeline_order`` is a
    drawing, whose last rank starts at micro-batch 1), but a loop, which is followed here.
    """
    if schedule == "1f1b":
        orders = []
        for rank in range(pp):
            ahead = min(micro_batches, pp - rank)
            order = [Operation("forward", rank, index) for index in range(ahead)]
            for index in range(micro_batches):
                order.append(Operation("backward", rank, index))
                if index + ahead < micro_batches:
                    order.append(Operation("forward", rank, index + ahead))
            orders.append(order)
        return orders
    mine = stages_of_rank(0, pp, vpp, schedule)
    stubs = [
        SimpleNamespace(num_stages=pp * len(mine), group_size=pp, group_rank=0, submod=nn.Identity()) for _ in mine
    ]
    stock = make_schedule(schedule, cast(Any, stubs), micro_batches, None)
    order = cast(Any, stock).pipeline_order
    return [
        [
            Operation(_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in order[rank]
            if action is not None
        ]
        for rank in range(pp)
    ]


def bubble_fraction(
    schedule: Schedule, pp: int, vpp: int, micro_batches: int, stages: Sequence[int] | None = None
) -> float:
    """Return the share of a step in which the ranks wait for one another, by simulating the schedule.

    Without ``stages``, the cost of each, every stage takes equally long. For 1F1B that is
    ``(pp - 1) / (micro_batches + pp - 1)``.
    """
    orders = schedule_operations(schedule, pp, vpp, micro_batches)
    costs = stages or [1] * (1 + max(operation.stage for order in orders for operation in order))
    work = sum(_COST[operation.kind] * costs[operation.stage] for order in orders for operation in order)
    return 1 - work / (pp * step_length(orders, costs))


def step_length(orders: Sequence[Sequence[Operation]], costs: Sequence[int]) -> int:
    """Return when the last rank is done, in units of a stage's forward for a stage of cost 1.

    Backward takes twice its forward (half of it for each of the two passes of ``zbv``), and messages take no time.

    Args:
        orders: of :func:`schedule_operations`.
        costs: forward time of each stage, in any unit.
    """
    last = len(costs) - 1
    done: dict[Operation, int] = {}
    clocks, places = [0] * len(orders), [0] * len(orders)
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = sum(places)
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                operation = order[places[rank]]
                stage, index = operation.stage, operation.micro_batch
                # What it needs of other stages; of the next one, the backward or its first pass.
                if operation.kind == "forward":
                    needed = [Operation("forward", stage - 1, index)] if stage > 0 else []
                elif operation.kind == "backward_weight":
                    needed = [Operation("backward_input", stage, index)]
                elif stage == last:
                    needed = [Operation("forward", stage, index)]
                else:
                    needed = [Operation("backward", stage + 1, index), Operation("backward_input", stage + 1, index)]
                times = [done[other] for other in needed if other in done]
                if needed and not times:
                    break
                length = _COST[operation.kind] * costs[operation.stage]
                clocks[rank] = done[operation] = max([clocks[rank], *times]) + length
                places[rank] += 1
        assert sum(places) > before, f"{len(orders)} ranks with {len(costs)} stages deadlock"
    return max(clocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCosts:
    """Operations of the parts that cuts can separate, in one unit. Integers, so that equal costs compare as equal."""

    layers: Mapping[str, int]
    """Cost of each layer by its name, in order."""
    first: int = 0
    """Cost of what runs before the layers."""
    last: int = 0
    """Cost of what runs after the layers, and of the loss."""


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
    # Micro-batches whose activations each stage keeps at most.
    now, in_flight = Counter[int](), [0] * stages
    for operation in (operation for order in orders for operation in order):
        if operation.kind == "forward":
            now[operation.stage] += 1
            in_flight[operation.stage] = max(in_flight[operation.stage], now[operation.stage])
        elif operation.kind != "backward_input":
            now[operation.stage] -= 1
    ends = _descend(_shortest(costs, stages), costs, ranks, in_flight)
    size, rest = divmod(len(names), stages)
    even = [size * (stage + 1) for stage in range(stages)]
    # A shorter longest rank can still make a longer step where there are few micro-batches.
    if not rest and step_length(orders, _of_stages(even, costs)) <= step_length(orders, _of_stages(ends, costs)):
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
        # Ends after each move of one layer between two stages: the cuts between them move by one.
        tried, last = [], len(ends) - 1
        for begin, end, step in product(range(last), range(1, last + 1), (-1, 1)):
            moved = [cut + step if begin <= place < end else cut for place, cut in enumerate(ends)]
            inner = [0, *moved[:-1]]
            if begin < end and all(a < b for a, b in pairwise(inner)) and inner[-1] <= moved[-1]:
                tried.append((rating(moved), moved))
        best = min(tried, default=(rated, ends))
        if best[0] >= rated:
            return ends
        rated, ends = best
