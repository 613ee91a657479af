"""``nxdt plan``: what a run would need in a world of any size, without its devices."""

from __future__ import annotations

import click

from nxdt_core.cli.plan.report import print_report
from nxdt_core.cli.plan.search import print_progress, print_ranking
from nxdt_core.cli.verb import Verb, as_json, config_arguments, print_json, print_note
from nxdt_core.engine.compile_cache import check_torch_folder
from nxdt_core.errors.launch import TwoMemorySizes

__all__ = ["plan"]

_GIB = 2**30


@click.command(
    cls=Verb,
    short_help="Estimate the memory, traffic and time of a run, without its devices.",
    examples=(
        "nxdt plan recipe:llama3-70b --world-size 512",
        "nxdt plan my_run.yaml --memory-gib 80",
        "nxdt plan recipe:llama3-8b-trn2 --device trn2",
        "nxdt plan recipe:llama3-70b --world-size 512 --device h200",
        "nxdt plan recipe:llama3-70b --world-size 512 --device h200 --search",
        "nxdt plan recipe:llama3-8b distributed_strategy.zero_stage=3 data.micro_batch_size=2 --json",
    ),
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
    """Say what a run would need: memory of each rank by what it is for, traffic, idle time, time per step, sizes.

    CONFIG and KEY=VALUE are those of `nxdt train`; what that would refuse is refused here too. The model is
    built without memory, laid out as it would be, and a micro-batch is sent through it in shapes alone: no
    device is needed, nothing is downloaded, no data is read. Exit status 1 where a rank needs more memory than
    there is.

    --search tries sizes of tensor, pipeline, context and expert parallelism, ZeRO-1 and ZeRO-3, with less and
    more recomputation. It prints the fastest that leave a tenth of the memory free, and the keys that select the
    first. It takes minutes for large models.
    """
    from nxdt_core.config import load

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
    from nxdt_core.train.plan import EFFICIENCY
    from nxdt_core.train.plan import plan as make  # imports torch: only a configuration that is right pays for it

    if search and device is not None:
        from nxdt_core.train.layout_search import search as find

        found = find(
            lambda settings: load(source, (*overrides, *world, *settings)),
            product=device,
            efficiency=EFFICIENCY if efficiency is None else efficiency,
            trying=print_progress,
        )
        if json_output:
            print_json(found.to_dict())
        else:
            print_ranking(found)
        return
    made = make(
        config,
        memory_bytes=None if memory_gib is None else round(memory_gib * _GIB),
        product=device,
        efficiency=EFFICIENCY if efficiency is None else efficiency,
    )
    if json_output:
        print_json(made.to_dict())
    else:
        print_report(made)
    ctx.exit(1 if made.fits is False else 0)
