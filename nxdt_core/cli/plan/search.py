"""The ranking of ``nxdt plan --search`` for a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from nxdt_core.cli.terminal.table import human_size, percent, print_table

if TYPE_CHECKING:
    from nxdt_core.train.layout_search import Search
    from nxdt_core.train.plan import RunPlan

__all__ = ["print_progress", "print_ranking"]

_SHOWN = 10
_TITLES = ("", "TP", "PP", "CP", "EP", "DP", "ZERO", "RECOMPUTES", "MEMORY", "S/STEP", "TOKENS/S", "MFU")


def print_progress(number: int, count: int) -> None:
    """Show on a terminal which combination of sizes is being tried."""
    if sys.stderr.isatty():
        click.echo("\r\x1b[K" if number == count else f"\rsizes {number} of {count}", err=True, nl=False)


def print_ranking(search: Search) -> None:
    """Print the fastest layouts, the configuration as it is, and the keys that select the fastest."""
    best, given = search.found[0], search.given
    rows = [_row(str(place), each.plan) for place, each in enumerate(search.found[:_SHOWN], start=1)]
    rows.append(_row("given", given))
    unused = {
        title
        for column, title in enumerate(_TITLES)
        if title in ("CP", "EP") and all(row[column] == "1" for row in rows)
    }
    kept = [column for column, title in enumerate(_TITLES) if title not in unused]
    titles = [_TITLES[column] for column in kept]
    print_table(
        titles,
        [[row[column] for column in kept] for row in rows],
        right=[title for title in titles if title not in ("", "RECOMPUTES")],
        optional=("TOKENS/S", "DP"),
    )
    click.echo()
    device = f"{given.product}, {human_size(given.memory_bytes or 0)} each"
    click.echo(
        f"{search.estimated} layouts estimated for {given.sizes.world_size:,} devices ({device}), {search.refused} not "
        f"possible; TOKENS/S per device, from data sheets, not measured"
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
