"""Rules of the pipeline: how layers become stages, and how many micro-batches a schedule needs."""

from __future__ import annotations

from collections.abc import Iterator

from nxdt_core.config.checks import BATCH, MICRO_BATCH, PP, VPP, mesh_sizes, micro_batches
from nxdt_core.errors.configuration import ImpossibleCombination
from nxdt_core.protocols.parallel.rules import Settings

__all__ = ["STAGE_RULES"]

_SCHEDULE = "distributed_strategy.pipeline_schedule"
_LAYERS, _CUTS, _COMPILE = "model.num_layers", "model.pipeline_cuts", "model.compile"
_SP = "distributed_strategy.sequence_parallel"
_REGATHER = "distributed_strategy.sequence_parallel_regather"
_RECOMPUTE = "model.activations_checkpoint_granularity"


def layers_fill_stages(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Each stage of the pipeline takes a layer, unless ``model.pipeline_cuts`` says where to cut."""
    numbers, sizes = settings.numbers(_LAYERS), mesh_sizes(settings)
    if numbers is None or sizes is None or sizes.pp == 1 or settings.values.get(_CUTS):
        return
    layers = numbers[0]
    if layers < sizes.stages:
        yield ImpossibleCombination(
            **settings.place(_LAYERS, PP, VPP),
            reason=f"{layers} layers cannot fill {_stages(sizes.pp, sizes.vpp)}",
            advice=f"Choose sizes of at most {layers} stages.",
        )


def cuts_match_stages(settings: Settings) -> Iterator[ImpossibleCombination]:
    """``model.pipeline_cuts`` has one name fewer than there are stages."""
    cuts, sizes = settings.values.get(_CUTS), mesh_sizes(settings)
    if not cuts or sizes is None or sizes.pp == 1:
        return
    if len(cuts) != sizes.stages - 1:
        yield ImpossibleCombination(
            **settings.place(_CUTS),
            reason=f"{len(cuts)} cuts make {len(cuts) + 1} stages, but there are {_stages(sizes.pp, sizes.vpp)}",
            advice=f"Name {sizes.stages - 1} cuts.",
        )


def schedule_knows_stages(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield a number of stages per device that the schedule does not have."""
    schedule, vpp, pp = settings.values.get(_SCHEDULE), settings.values.get(VPP) or 1, settings.values.get(PP)
    if schedule is None or pp == 1:
        return
    fits = {"1f1b": vpp == 1, "interleaved": vpp > 1, "zbv": vpp <= 2}
    wants = {"1f1b": "one stage", "interleaved": "several stages", "zbv": "two stages"}
    if not fits[schedule]:
        yield ImpossibleCombination(
            **settings.place(_SCHEDULE, VPP),
            reason=f"the schedule {schedule} has {wants[schedule]} a device, and"
            f" virtual_pipeline_model_parallel_size is {vpp}",
            advice="Set the virtual size to 2 or more." if vpp == 1 else "Leave the schedule out, or change that size.",
        )


def schedule_has_micro_batches(settings: Settings) -> Iterator[ImpossibleCombination]:
    """Yield what ``torch.distributed.pipelining`` (2.13) asks of the number of micro-batches.

    1F1B takes at least as many as stages. The interleaved one works in rounds of at least PP micro-batches, all of
    one size. ZBV takes any number; with fewer than 2 PP - 1 its devices only wait longer.
    """
    sizes, count = mesh_sizes(settings), micro_batches(settings)
    if sizes is None or count is None or sizes.pp == 1:
        return
    rounds = max(1, count // sizes.pp)
    if sizes.schedule == "1f1b" and count < sizes.pp:
        problem = f"needs at least {sizes.pp}, one per stage"
    elif sizes.schedule == "interleaved" and count % rounds:
        problem = f"needs rounds of one size, and {count} do not divide into {rounds}"
    else:
        return
    whole = -(-count // sizes.pp) * sizes.pp
    micro = settings.values[MICRO_BATCH]
    yield ImpossibleCombination(
        **settings.place(BATCH, MICRO_BATCH, PP),
        reason=f"each data parallel rank has {count} micro-batches per step, and the schedule {sizes.schedule} over"
        f" {sizes.pp} pipeline ranks {problem}",
        advice=f"Write {whole * sizes.dp * micro} for {whole} micro-batches of {micro}, or change"
        f" {MICRO_BATCH} or the layout.",
    )


def schedule_compiles(settings: Settings) -> Iterator[ImpossibleCombination]:
    """ZBV takes each backward apart into inputs and weights; a compiled layer's is one piece."""
    sizes = mesh_sizes(settings)
    if sizes is not None and sizes.schedule == "zbv" and settings.values.get(_COMPILE):
        yield ImpossibleCombination(
            **settings.place(_COMPILE, _SCHEDULE),
            reason="the schedule zbv takes the backward of layers apart, and that of a compiled layer is one piece",
            advice=f"Set {_COMPILE} to false, or choose 1f1b or interleaved.",
        )


def schedule_recomputes(settings: Settings) -> Iterator[ImpossibleCombination]:
    """ZBV looks at a layer's graph twice, and each time would compute the layer again."""
    sizes = mesh_sizes(settings)
    if sizes is not None and sizes.schedule == "zbv" and settings.values.get(_RECOMPUTE):
        yield ImpossibleCombination(
            **settings.place(_RECOMPUTE, _SCHEDULE),
            reason="the schedule zbv takes the backward of layers apart, and would recompute each of them many times",
            advice=f"Set {_RECOMPUTE} to null, or choose 1f1b or interleaved.",
        )


def schedule_regathers(settings: Settings) -> Iterator[ImpossibleCombination]:
    """ZBV reads what a layer keeps twice, and each time would gather it."""
    sizes = mesh_sizes(settings)
    reads = sizes is not None and sizes.schedule == "zbv" and sizes.tp > 1
    if reads and settings.values.get(_SP) and settings.values.get(_REGATHER):
        yield ImpossibleCombination(
            **settings.place(_REGATHER, _SCHEDULE),
            reason="the schedule zbv takes the backward of layers apart, and would gather inputs in both parts",
            advice=f"Set {_REGATHER} to false, or choose 1f1b or interleaved.",
        )


def _stages(pp: int, vpp: int) -> str:
    return f"PP {pp} x {vpp} a device = {pp * vpp} stages"


STAGE_RULES = (
    layers_fill_stages,
    cuts_match_stages,
    schedule_knows_stages,
    schedule_has_micro_batches,
    schedule_compiles,
    schedule_recomputes,
    schedule_regathers,
)
"""In the order in which they are tried."""
