"""Stock pipeline schedules by the names of the configuration, and what they cost in idle time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from nxdt_core.protocols.mesh import Schedule, stages_of_rank

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

    StockSchedule = Schedule1F1B | ScheduleInterleaved1F1B | ScheduleZBVZeroBubble


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
        return [_one_forward_one_backward(rank, pp, micro_batches) for rank in range(pp)]
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
                ready = _ready_at(operation, done, last)
                if ready is None:
                    break
                length = _COST[operation.kind] * costs[operation.stage]
                clocks[rank] = done[operation] = max(clocks[rank], ready) + length
                places[rank] += 1
        assert sum(places) > before, f"{len(orders)} ranks with {len(costs)} stages deadlock"
    return max(clocks)


def _one_forward_one_backward(rank: int, pp: int, micro_batches: int) -> list[Operation]:
    ahead = min(micro_batches, pp - rank)
    order = [Operation("forward", rank, index) for index in range(ahead)]
    for index in range(micro_batches):
        order.append(Operation("backward", rank, index))
        if index + ahead < micro_batches:
            order.append(Operation("forward", rank, index + ahead))
    return order


def _ready_at(operation: Operation, done: Mapping[Operation, int], last: int) -> int | None:
    """Return when the inputs of ``operation`` from other stages are ready; None: not yet."""
    stage, index = operation.stage, operation.micro_batch
    if operation.kind == "forward":
        return 0 if stage == 0 else done.get(Operation("forward", stage - 1, index))
    if operation.kind == "backward_weight":
        return done.get(Operation("backward_input", stage, index))
    if stage == last:
        return done.get(Operation("forward", stage, index))
    kinds: tuple[OperationKind, ...] = ("backward", "backward_input")
    times = [done[step] for kind in kinds if (step := Operation(kind, stage + 1, index)) in done]
    return times[0] if times else None
