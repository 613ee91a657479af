"""``nxdt plan``: what a run would need in a world of any size, without its devices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from nxdt_core.cli.terminal import human_size, percent, print_facts, print_table, print_wrapped
from nxdt_core.cli.verb import as_json, config_arguments, print_json, print_note, verb
from nxdt_core.config import load
from nxdt_core.engine.compile_cache import check_torch_folder
from nxdt_core.errors.launch import TwoMemorySizes

if TYPE_CHECKING:
    from nxdt_core.train.plan import RunPlan, Search

_MIB, _GIB = 2**20, 2**30
_PARTS = {
    "weights": "stored, and gathered for computing",
    "gradients": "",
    "optimizer": "state, and float32 masters where weights are not",
    "activations": "kept for backward, all micro-batches in flight",
    "logits": "with their gradient and the loss",
    "workspace": "of backward, with what it recomputes",
    "communication": "gathered weights and gradients on their way",
    "cache": "keys and values while answers are written",
}
_MEASURED = (
    "The plan counts tensors. nxdt report shows what a run measured: on a GPU the peak of torch's allocator, on a CPU "
    "that of the whole process."
)
_DIMENSIONS = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "token_shuffle": "tokens mixed before experts",
    "pp": "to other pipeline stages",
    "dp": "weights and gradients, data parallel",
    "other": "",
}
_SHOWN = 10
_TITLES = ("", "TP", "PP", "CP", "EP", "DP", "ZERO", "RECOMPUTES", "MEMORY", "S/STEP", "TOKENS/S", "MFU")


@verb(
    "nxdt plan recipe:llama3-70b --world-size 512",
    "nxdt plan my_run.yaml --memory-gib 80",
    "nxdt plan recipe:llama3-8b-trn2 --device trn2",
    "nxdt plan recipe:llama3-70b --world-size 512 --device h200",
    "nxdt plan recipe:llama3-70b --world-size 512 --device h200 --search",
    "nxdt plan recipe:llama3-8b distributed_strategy.zero_stage=3 data.micro_batch_size=2 --json",
)
@config_arguments
@click.option("--world-size", type=click.IntRange(1), help="Processes; by default trainer.devices x trainer.num_nodes.")
@click.option(
    "--memory-gib",
    type=click.FloatRange(0, min_open=True),
    help="Memory of one device; by default that of this machine's accelerator.",
)
@click.option(
    "--device",
    help="Take the memory that a process has on this product, and estimate the time of a step: H100, H200, trn2, ….",
)
@click.option(
    "--efficiency",
    type=click.FloatRange(0, 1, min_open=True),
    help="Share of the product's peak FLOP/s that kernels reach, with --device; 0.6 by default.",
)
@click.option("--search", is_flag=True, help="Rank the layouts that fit the product of --device by time per step.")
@as_json
@click.pass_context
def plan(
    ctx: click.Context,
    source: str,
    overrides: tuple[str, ...],
    world_size: int | None,
    memory_gib: float | None,
    device: str | None,
    efficiency: float | None,
    search: bool,
    json_output: bool,
) -> None:
    """Estimate what a run needs: memory of each rank by purpose, traffic, idle time, time per step and sizes.

    CONFIG and KEY=VALUE are those of `nxdt train`; what it refuses is refused here too. The model is built without
    memory, in the layout of the run, and only shapes pass through it: no device is needed, nothing is downloaded
    and no data is read. The exit status is 1 if a rank needs more memory than a device has.

    --search tries sizes of tensor, pipeline, context and expert parallelism, ZeRO-1 and ZeRO-3, with less and
    more recomputation. It prints the fastest that leave a tenth of the memory free, and the keys that select the
    first. It takes minutes for large models.
    """
    if device is not None and memory_gib is not None:
        raise TwoMemorySizes()
    if efficiency is not None and device is None:
        raise click.UsageError("--efficiency is that of a product: give --device too.")
    if search and device is None:
        raise click.UsageError("--search ranks layouts by their time on a product: give --device too.")
    world = () if world_size is None else (f"trainer.devices={world_size}", "trainer.num_nodes=1")
    config = load(source, (*overrides, *world))
    for note in config.notes:
        print_note(note)

    check_torch_folder()
    ranks = config.run.trainer.devices * config.run.trainer.num_nodes
    show_progress(f"estimating {ranks:,} rank{'s' * (ranks > 1)}")
    try:
        import nxdt_core.train.plan as planning  # imports torch: only a configuration that is right pays for it

        device_options: dict[str, Any] = {"product": device, "efficiency": efficiency or planning.EFFICIENCY}
        if search:
            ranking = planning.search(
                lambda settings: load(source, (*overrides, *world, *settings)),
                trying=lambda number, count: show_progress(f"sizes {number} of {count}"),
                **device_options,
            )
        else:
            memory_bytes = None if memory_gib is None else round(memory_gib * _GIB)
            estimate = planning.plan(config, memory_bytes=memory_bytes, **device_options)
    finally:
        show_progress("")
    if search:
        print_json(ranking.to_dict()) if json_output else print_ranking(ranking)
        return
    print_json(estimate.to_dict()) if json_output else print_report(estimate)
    ctx.exit(1 if estimate.fits is False else 0)


def print_report(plan: RunPlan) -> None:
    """Print what the run needs, the fullest rank last."""
    print_facts(list(_facts(plan)))
    click.echo()
    # The ends of the pipeline and the fullest and the emptiest rank between them.
    ranks = plan.estimate.ranks
    inner = [pick(ranks[1:-1], key=lambda rank: rank.memory.total) for pick in (max, min) if len(ranks) > 2]
    shown = [rank for _, rank in sorted({rank.pp_rank: rank for rank in (ranks[0], ranks[-1], *inner)}.items())]
    titles = [f"PP {rank.pp_rank}" if plan.sizes.pp > 1 else "EACH RANK" for rank in shown]
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
    if any(rank.sent for rank in shown):
        click.echo()
        unit, size = _unit(max(max(rank.sent.values(), default=0) for rank in shown))
        rows = [
            (dimension, *(size(rank.sent.get(dimension, 0)) for rank in shown), what)
            for dimension, what in _DIMENSIONS.items()
            if any(rank.sent.get(dimension) for rank in shown)
        ]
        print_table((f"{unit} SENT", *titles, "BY A RANK IN A STEP"), rows, right=titles)
    time = plan.step_time
    if time is not None:
        click.echo()
        rows = [("compute", f"{time.compute:,.3f}", f"with kernels at {percent(time.efficiency, 0)} of the peak")]
        if time.waiting:
            rows.append(("pipeline", f"{time.waiting:,.3f}", "ranks wait for one another"))
        rows += [
            (dimension, f"{seconds:,.3f}", f"not hidden: {_DIMENSIONS.get(dimension, '')}".rstrip(": "))
            for dimension, seconds in time.exposed.items()
            if seconds
        ]
        rate = f"{time.tokens_per_second:,.0f} tokens/s per device, MFU {percent(time.mfu)}"
        total = click.style(f"{time.total:,.3f}", bold=True)
        rows.append((click.style("total", bold=True), total, f"{rate}; from data sheets, not measured"))
        print_table(("SECONDS", "PER STEP", "WHAT"), rows, right=("PER STEP",))
    elif plan.product is not None:
        click.echo()
        print_wrapped("no time per step", f"the links of {plan.product}, or its peak in this dtype, are not known")
    click.echo()
    print_wrapped("", _MEASURED)

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


def _facts(plan: RunPlan) -> Iterator[tuple[str, str]]:
    from nxdt_core.train.build import objective

    estimate, data, sizes = plan.estimate, plan.config.run.data, plan.sizes
    batch = objective(plan.config).traits.batch(data.global_batch_size, data.seq_length)
    yield "run", plan.config.source
    yield "layout", " · ".join(estimate.layout)
    trained = "" if estimate.trained == estimate.parameters else f", {_billions(estimate.trained)} of them trained"
    flops = _count(estimate.flops_per_token)
    yield "model", f"{_billions(estimate.parameters)} parameters{trained}; {flops}FLOP per token"
    micro_batches = f"{estimate.micro_batches:,} micro-batch{'es' * (estimate.micro_batches != 1)}"
    yield (
        "step",
        f"{batch} = {_billions(estimate.tokens_per_step)} tokens, {_count(estimate.flops_per_step)}FLOP;"
        f" {micro_batches} of {data.micro_batch_size} per rank",
    )
    if sizes.pp > 1:
        yield "pipeline", f"{sizes.schedule}; ranks wait {percent(estimate.bubble)} of a step for one another"
    if estimate.stage_layers:
        cuts = "from model.pipeline_cuts" if plan.config.run.model.pipeline_cuts else "chosen by computation"
        runs = [(number, len(list(same))) for number, same in groupby(estimate.stage_layers)]  # 5, 14 x 6, 4
        shares = f"{', '.join(f'{n}' if count == 1 else f'{count} x {n}' for n, count in runs)} layers"
        yield "stages", f"{shares}, {cuts}; the longest rank computes {estimate.longest_rank:.3f} times the mean"
    yield "checkpoint", f"{human_size(estimate.checkpoint_bytes)}, weights and optimizer state"


def _unit(largest_bytes: int) -> tuple[str, Callable[[int], str]]:
    """One unit for a table, by its largest entry: its name, and how to write a size in it."""
    name, unit = ("GIB", _GIB) if largest_bytes >= _GIB else ("MIB", _MIB)
    return name, lambda size_bytes: f"{size_bytes / unit:,.2f}"


def _billions(number: int) -> str:
    """Return a count in the notation of model sizes: ``70.6B``."""
    return _count(number).replace(" ", "").replace("G", "B")


def _count(number: float) -> str:
    """Return ``number`` with the prefix that leaves one to three digits: ``70.6 G``; a unit may follow."""
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if number < 1000:
            return f"{number:.0f} " if not prefix else f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} Z"


def show_progress(text: str) -> None:
    """Show on a terminal what is being estimated, in place of what was shown before; an empty text clears the line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def print_ranking(search: Search) -> None:
    """Print the fastest layouts, the configuration as it is, and the keys that select the fastest."""
    best, as_configured = search.ranked[0], search.as_configured
    rows = [_row(str(place), layout.plan) for place, layout in enumerate(search.ranked[:_SHOWN], start=1)]
    rows.append(_row("given", as_configured))
    columns = dict(zip(_TITLES, zip(*rows, strict=True), strict=True))
    for title in ("CP", "EP"):
        if set(columns[title]) == {"1"}:
            del columns[title]
    right = [title for title in columns if title not in ("", "RECOMPUTES")]
    print_table([*columns], [*zip(*columns.values(), strict=True)], right=right, optional=("TOKENS/S", "DP"))
    click.echo()
    device = f"{as_configured.product}, {human_size(as_configured.memory_bytes or 0)} each"
    click.echo(
        f"{search.estimated} layouts estimated for {as_configured.sizes.world_size:,} devices ({device}), "
        f"{search.refused} not possible; TOKENS/S per device, from data sheets, not measured"
    )
    click.echo()
    click.echo(click.style("the fastest:", bold=True))
    for key, value in best.settings.items():
        click.echo(f"  {key}={value}")


def _row(name: str, plan: RunPlan) -> tuple[str, ...]:
    sizes, time = plan.sizes, plan.step_time
    assert time is not None
    model = plan.config.run.model
    recomputes = {None: "", "full": "layers"}.get(
        model.activations_checkpoint_granularity, ", ".join(model.activations_checkpoint_recompute or ())
    )
    strategy = plan.config.run.distributed_strategy
    if sizes.tp > 1 and strategy.sequence_parallel and strategy.sequence_parallel_regather:
        recomputes = ", ".join(filter(None, (recomputes, "gathers")))
    needed = human_size(plan.estimate.fullest.memory.total)
    return (
        name,
        *(str(size) for size in (sizes.tp, sizes.pp, sizes.cp, sizes.ep, sizes.dp)),
        str(sizes.zero_stage),
        recomputes,
        needed if plan.fits else f"{needed}, too much",
        f"{time.total:,.2f}" if time.total >= 1 else f"{time.total:.2g}",
        f"{time.tokens_per_second:,.0f}",
        percent(time.mfu),
    )
