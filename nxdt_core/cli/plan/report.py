"""The report of ``nxdt plan`` for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import groupby
from typing import TYPE_CHECKING

import click

from nxdt_core.cli.terminal.table import human_size, percent, print_facts, print_table, print_wrapped

if TYPE_CHECKING:
    from nxdt_core.protocols.estimate import RankEstimate
    from nxdt_core.train.plan import RunPlan, StepTime

__all__ = ["print_report"]

_MIB, _GIB = 2**20, 2**30

_PARTS = {
    "weights": "stored, and gathered for computing",
    "gradients": "",
    "optimizer": "state, and float32 masters where weights are not",
    "activations": "kept for backward, all micro-batches in flight",
    "logits": "with their gradient and the loss",
    "workspace": "of backward, with what it recomputes",
    "communication": "gathered weights and gradients on their way",
}

_DIMENSIONS = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "token_shuffle": "tokens mixed before experts",
    "pp": "to other pipeline stages",
    "dp": "weights and gradients, data parallel",
    "other": "",
}


def print_report(plan: RunPlan) -> None:
    """Print what the run needs, the fullest rank last."""
    print_facts(list(_facts(plan)))
    click.echo()
    shown = _columns(plan.estimate.ranks)
    titles = [_title(rank, plan) for rank in shown]
    _print_memory(plan, shown, titles)
    if any(rank.sent for rank in shown):
        click.echo()
        _print_traffic(shown, titles)
    if plan.step_time is not None:
        click.echo()
        _print_time(plan.step_time)
    elif plan.product is not None:
        click.echo()
        print_wrapped("no time per step", f"the links of {plan.product}, or its peak in this dtype, are not known")
    click.echo()
    _print_verdict(plan)


def _facts(plan: RunPlan) -> Iterator[tuple[str, str]]:
    found, data, sizes = plan.estimate, plan.config.run.data, plan.sizes
    yield "run", plan.config.source
    yield "layout", " · ".join(plan.estimate.layout)
    trained = "" if found.trained == found.parameters else f", {_billions(found.trained)} of them trained"
    yield "model", f"{_billions(found.parameters)} parameters{trained}; {_count(found.flops_per_token)}FLOP per token"
    yield (
        "step",
        f"{data.global_batch_size:,} sequences of {data.seq_length:,} = {_billions(found.tokens_per_step)} tokens,"
        f" {_count(found.flops_per_step)}FLOP; {_plural(found.micro_batches, 'micro-batch', 'micro-batches')}"
        f" of {data.micro_batch_size} per rank",
    )
    if sizes.pp > 1:
        yield "pipeline", f"{sizes.schedule}; ranks wait {percent(found.bubble)} of a step for one another"
    if found.stage_layers:
        cuts = "from model.pipeline_cuts" if plan.config.run.model.pipeline_cuts else "chosen by computation"
        shares = f"{_runs(found.stage_layers)} layers"
        yield "stages", f"{shares}, {cuts}; the longest rank computes {found.longest_rank:.3f} times the mean"
    yield "checkpoint", f"{human_size(found.checkpoint_bytes)}, weights and optimizer state"


def _runs(numbers: tuple[int, ...]) -> str:
    """Return numbers with repeated ones counted: ``5, 14 x 6, 4``."""
    runs = [(number, len(list(same))) for number, same in groupby(numbers)]
    return ", ".join(f"{number}" if count == 1 else f"{count} x {number}" for number, count in runs)


def _columns(ranks: tuple[RankEstimate, ...]) -> list[RankEstimate]:
    """The ends of the pipeline and the fullest and the emptiest rank between them."""
    inner = ranks[1:-1]
    shown = {rank.pp_rank: rank for rank in (ranks[0], ranks[-1])}
    for pick in (max, min):
        if inner:
            rank = pick(inner, key=lambda rank: rank.memory.total)
            shown[rank.pp_rank] = rank
    return [shown[number] for number in sorted(shown)]


def _title(rank: RankEstimate, plan: RunPlan) -> str:
    return f"PP {rank.pp_rank}" if plan.sizes.pp > 1 else "EACH RANK"


def _print_memory(plan: RunPlan, shown: list[RankEstimate], titles: list[str]) -> None:
    unit, size = _unit(max(rank.memory.total for rank in shown))
    rows = [("layers", *(str(rank.layers) for rank in shown), "")]
    rows.append(("parameters", *(_billions(rank.parameters) for rank in shown), "that a rank computes with"))
    for part in fields(shown[0].memory):
        sizes = [getattr(rank.memory, part.name) for rank in shown]
        if any(sizes):
            rows.append((part.name, *map(size, sizes), _PARTS[part.name]))
    fullest = plan.estimate.fullest
    marked = fullest if len(shown) > 1 else None
    totals = [
        click.style(size(rank.memory.total), bold=rank is not marked, fg="yellow" if rank is marked else None)
        for rank in shown
    ]
    rows.append((click.style("total", bold=True), *totals, "at the peak of a step"))
    print_table((unit, *titles, "WHAT"), rows, right=titles)


def _print_traffic(shown: list[RankEstimate], titles: list[str]) -> None:
    unit, size = _unit(max(max(rank.sent.values(), default=0) for rank in shown))
    rows = [
        (dimension, *(size(rank.sent.get(dimension, 0)) for rank in shown), what)
        for dimension, what in _DIMENSIONS.items()
        if any(rank.sent.get(dimension) for rank in shown)
    ]
    print_table((f"{unit} SENT", *titles, "BY A RANK IN A STEP"), rows, right=titles)


def _print_time(time: StepTime) -> None:
    rows = [("compute", _seconds(time.compute), f"with kernels at {percent(time.efficiency, 0)} of the peak")]
    if time.waiting:
        rows.append(("pipeline", _seconds(time.waiting), "ranks wait for one another"))
    rows += [
        (dimension, _seconds(seconds), f"not hidden: {_DIMENSIONS.get(dimension, '')}".rstrip(": "))
        for dimension, seconds in time.exposed.items()
        if seconds
    ]
    rate = f"{time.tokens_per_second:,.0f} tokens/s per device, MFU {percent(time.mfu)}; from data sheets, not measured"
    rows.append((click.style("total", bold=True), click.style(_seconds(time.total), bold=True), rate))
    print_table(("SECONDS", "PER STEP", "WHAT"), rows, right=("PER STEP",))


def _seconds(seconds: float) -> str:
    return f"{seconds:,.3f}"


def _print_verdict(plan: RunPlan) -> None:
    fullest = plan.estimate.fullest
    needed = fullest.memory.total
    largest = max(_PARTS, key=lambda part: int(getattr(fullest.memory, part)))
    who = f"pipeline rank {fullest.pp_rank} is the fullest: it" if plan.sizes.pp > 1 else "each rank"
    need = f"{who} needs {human_size(needed)}, most of it {largest}"
    if plan.memory_bytes is None:
        print_wrapped("", f"{need}; --memory-gib compares it with a device")
        return
    words, colour = ("tight", "yellow") if plan.tight else ("fits", "green")
    if not plan.fits:
        words, colour = "does not fit", "red"
    has = f"a device has {human_size(plan.memory_bytes)} ({percent(needed / plan.memory_bytes, 0)})"
    print_wrapped(words, f"{need}; {has}", colour=colour)


def _unit(largest_bytes: int) -> tuple[str, Callable[[int], str]]:
    """One unit for a table, by its largest entry: its name, and how to write a size in it."""
    name, unit = ("GIB", _GIB) if largest_bytes >= _GIB else ("MIB", _MIB)
    return name, lambda size_bytes: f"{size_bytes / unit:,.2f}"


def _billions(number: int) -> str:
    """Return a count in the notation of model sizes: ``70.6B``."""
    return _count(number).replace(" ", "").replace("G", "B")


def _plural(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _count(number: float) -> str:
    """With the prefix that leaves one to three digits: ``70.6 G``; a unit may follow."""
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if number < 1000:
            return f"{number:.0f} " if not prefix else f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} Z"
