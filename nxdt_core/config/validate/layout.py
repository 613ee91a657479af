"""Rules of the layout that hold for every engine: processes fill copies of the model, and the batch fills processes.

What one engine asks of heads, stages or sequences is named by its record (:attr:`nxdt_core.api.EngineComponent.rules`).
"""

from __future__ import annotations

from collections.abc import Iterator

from nxdt_core.config.validate.checked import Checked
from nxdt_core.config.validate.sizes import BATCH, CP, EP, MICRO_BATCH, PP, REPLICAS, TP, WORLD, mesh_sizes
from nxdt_core.errors.configuration import ImpossibleCombination, Misfit

__all__ = ["LAYOUT_RULES"]


def world_divides(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield a number of processes that does not fill whole copies of the model."""
    numbers = checked.numbers(*WORLD, TP, PP, CP)
    if numbers is None:
        return
    devices, nodes, tp, pp, cp = numbers
    if devices * nodes % (tp * pp * cp):
        groups, rest = divmod(devices * nodes, pp * cp)
        name = "trainer.devices x trainer.num_nodes" + (" / (PP x CP)" if pp * cp > 1 else "")
        yield ImpossibleCombination(
            **checked.place(*WORLD, TP, PP, CP),
            reason=f"{nodes} x {devices} processes do not divide into groups of TP {tp} x PP {pp} x CP {cp}",
            advice=f"Make trainer.devices x trainer.num_nodes a multiple of {tp * pp * cp}.",
            cause=None if rest else Misfit(of=TP, divisor=tp, place=checked.place(TP), name=name, number=groups),
        )


def replicas_divide(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Data parallel ranks fall into equal groups, and expert parallel ranks fill such a group."""
    numbers = checked.numbers(*WORLD, TP, PP, CP, REPLICAS, EP)
    if numbers is None:
        return
    devices, nodes, tp, pp, cp, replicas, ep = numbers
    dp, rest = divmod(devices * nodes, tp * pp * cp)
    if rest:
        return
    if dp % replicas:
        yield ImpossibleCombination(
            **checked.place(REPLICAS, *WORLD),
            reason=f"{dp} data parallel ranks do not divide into {replicas} groups",
            advice=f"Choose a divisor of {dp}.",
        )
    elif dp // replicas * cp % ep:
        shards = dp // replicas * cp
        yield ImpossibleCombination(
            **checked.place(EP, REPLICAS, CP, *WORLD),
            reason=f"expert parallelism borrows from {shards} data and context parallel ranks, which EP {ep} does not"
            " divide",
            advice=f"Choose a divisor of {shards}.",
        )


def batch_divides(checked: Checked) -> Iterator[ImpossibleCombination]:
    """Yield a global batch that is not a whole number of micro-batches on each data parallel rank."""
    numbers, sizes = checked.numbers(BATCH, MICRO_BATCH), mesh_sizes(checked)
    if numbers is None or sizes is None:
        return
    whole, micro = numbers
    if whole % (micro * sizes.dp):
        yield ImpossibleCombination(
            **checked.place(BATCH, MICRO_BATCH),
            reason=f"{whole} does not divide by data.micro_batch_size {micro} x {sizes.dp} data parallel ranks",
            advice=f"Write a multiple of {micro * sizes.dp}.",
        )


LAYOUT_RULES = (
    world_divides,
    replicas_divide,
    batch_divides,
)
"""In the order in which they are tried."""
