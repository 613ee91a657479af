"""``nxdt compile``: fill the cache of compiled graphs that a run reads."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import click

from nxdt_core.cli.verb import Verb, config_arguments, print_note, say
from nxdt_core.engine.compile_cache import check_torch_folder

if TYPE_CHECKING:
    from nxdt_core.config import ResolvedConfig
    from nxdt_core.launch.supervision.client import Client
    from nxdt_core.protocols.engine import CompileAhead


@click.command(
    "compile",
    cls=Verb,
    examples=(
        "nxdt compile my_run.yaml model.compile=true",
        "nxdt compile recipe:llama-tiny model.compile=true compiler_cache_url=/shared/graphs",
        "nxdt compile recipe:llama3-8b parallel_engine.name=nxd",
    ),
)
@config_arguments
@click.pass_context
def compile_ahead(ctx: click.Context, source: str, overrides: tuple[str, ...]) -> None:
    """Compile the graphs of a run, so that its first step finds them in a cache.

    CONFIG and KEY=VALUE are those of `nxdt train`. A trial of the run trains for three steps and validates, with
    fresh weights, on as many processes as the run has. It writes no checkpoint and leaves the run's directory alone.
    The cache is at compiler_cache_url, by default where the compiler has it; `nxdt train` with the same
    configuration reads it. The output says which graphs were new.
    """
    from nxdt_core.launch.joining import find_place

    place = find_place()
    if place.world_size > 1:
        from nxdt_core.launch.rank import as_rank

        ctx.exit(as_rank(place, lambda client: _as_rank(_load(source, overrides, client.is_first), client)))
    config = _load(source, overrides)
    from nxdt_core.train.compile_ahead import ahead_of  # imports torch: only a right configuration pays for it

    ahead = ahead_of(config)
    if ahead.tool:
        ctx.exit(_through_tool(config, ahead))
    if place.launcher or config.run.trainer.devices * config.run.trainer.num_nodes == 1:
        ctx.exit(_trial(config, ahead))
    from nxdt_core.cli.checks import check_layout

    check_layout(config)
    from nxdt_core.launch.launcher import launch

    outcome = launch(config, ["compile"])
    if outcome.text:
        say(outcome.text, err=True)
    ctx.exit(outcome.status)


def _load(source: str, overrides: tuple[str, ...], prints: bool = True) -> ResolvedConfig:
    from nxdt_core.config import load

    config = load(source, overrides)
    check_torch_folder()
    for note in config.notes if prints else ():
        print_note(note)
    return config


def _as_rank(config: ResolvedConfig, client: Client) -> int:
    from nxdt_core.train.compile_ahead import ahead_of

    client.watch(config.run.distributed_strategy.timeout_s)
    return _trial(config, ahead_of(config), speaks=client.place.rank == 0)


def _trial(config: ResolvedConfig, ahead: CompileAhead, *, speaks: bool = True) -> int:
    from nxdt_core.train.compile_ahead import run_trial

    if speaks:
        say(f"cache of compiled graphs: {ahead.cache}")
    began = time.monotonic()
    found = run_trial(config, ahead, say)
    if speaks and found is not None:
        say(f"graphs: {found}, in {time.monotonic() - began:.1f} s")
    return 0


def _through_tool(config: ResolvedConfig, ahead: CompileAhead) -> int:
    """Run this command behind the engine's tool, in whose environment the engine names none."""
    command = [*ahead.tool, sys.executable, "-m", "nxdt_core", "compile", "--", config.source, *config.overrides]
    say(f"cache of compiled graphs: {ahead.cache}")
    sys.stdout.flush()
    status = subprocess.run(command, env=os.environ, check=False).returncode
    if status == 0 and ahead.result is not None:
        say(ahead.result())
    return status if status >= 0 else 128 - status
