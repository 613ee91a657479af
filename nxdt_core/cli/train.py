"""``nxdt train``: one run, from a YAML file or a recipe. ``nxdt compile``: fill the cache of compiled graphs for it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

import click

from nxdt_core.cli.config import check_layout, require_set, vocabulary_notes
from nxdt_core.cli.verb import as_json, config_arguments, discard_output, print_json, print_note, say, verb
from nxdt_core.config import ResolvedConfig, load
from nxdt_core.config.sources import environment_notes
from nxdt_core.distributed.environment import find_place
from nxdt_core.engine.compile_cache import check_torch_folder
from nxdt_core.errors import NxdtError
from nxdt_core.launch.restarts import run_with_restarts
from nxdt_core.system.progress import PROGRESS, process_age_s
from nxdt_core.system.visible_text import from_here, visible

if TYPE_CHECKING:
    from nxdt_core.launch.supervision.client import Client


@verb(
    "nxdt train recipe:llama-tiny",
    "nxdt train my_run.yaml",
    "nxdt train my_run.yaml trainer.max_steps=1000 model.optim.lr=3e-4",
    "nxdt train my_run.yaml trainer.devices=4 distributed_strategy.tensor_model_parallel_size=2",
)
@config_arguments
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    help="How often this node restarts its ranks from the newest checkpoint after the loss of a rank or a node.",
)
@as_json
@click.pass_context
def train(ctx: click.Context, source: str, overrides: tuple[str, ...], max_restarts: int, json_output: bool) -> None:
    """Train a model.

    CONFIG is a YAML file or recipe:NAME. KEY=VALUE replaces or adds one value of it, with the key written
    as a dotted path. Everything is checked before anything is built.

    The same command resumes from the newest checkpoint where checkpoint.resume_if_exists is true. Ctrl-C
    and SIGTERM save a checkpoint at the next step and stop; a second Ctrl-C stops at once. The run continues
    when the reader of its output goes away. With --json, the summary at the end is JSON on standard output; everything
    else is on standard error.

    With trainer.devices above 1 it starts one process per device. With trainer.num_nodes above 1 run it on each
    node with NODE_RANK, MASTER_ADDR and MASTER_PORT set. Under torchrun, mpirun, Slurm's srun, or another launcher that
    sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, it joins the processes that are started.
    NXDT_LAUNCHER names one launcher where the variables of several are set.

    With --max-restarts N, the run starts again up to N times after the loss of a rank or a node. All nodes of the run
    need the option, and wait for one another. Errors with exit status 2 are not retried. `nxdt launch` writes jobs for
    clusters.
    """
    PROGRESS.counted_at = time.monotonic() - process_age_s()
    PROGRESS.spent("import")
    for name in ("stdout", "stderr"):  # the log files of a run keep all of it
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            setattr(sys, name, _Surviving(stream))
    place = find_place()
    if place.world_size > 1:
        from nxdt_core.launch.rank import as_rank

        def run(client: Client) -> int:
            return _train(_load(source, overrides, prints=client.is_first), client, json_output)

        ctx.exit(as_rank(place, run))
    options = ["--json"] if json_output else []
    config = _load(source, overrides, prints=not max_restarts)
    if max_restarts:
        ctx.exit(run_with_restarts(config, max_restarts, ["train", *options]))
    if place.launcher or config.run.trainer.devices * config.run.trainer.num_nodes == 1:
        ctx.exit(_train(config, json_output=json_output))
    check_layout(config)
    from nxdt_core.launch.launcher import launch
    from nxdt_core.run.callbacks.monitor import mark_failed

    try:
        status, failure = launch(config, ["train", *options])
    except NxdtError as error:
        mark_failed(config, str(error))
        raise
    if failure:
        mark_failed(config, failure, interrupted=status > 128)
        say(failure, err=True)
    ctx.exit(status)


def _load(source: str, overrides: tuple[str, ...], *, prints: bool = True, trial: bool = False) -> ResolvedConfig:
    config = load(source, overrides)
    notes = [*config.notes]
    if trial:
        check_torch_folder()
    else:
        require_set(config)
        PROGRESS.spent("configuration")
    if prints and not trial:
        notes += vocabulary_notes(config)
        # The variables of NxD Training's job scripts are those of its runtime, which an engine for XLA reads.
        if "xla" not in config.selected("engine").component.record.capabilities:
            notes += environment_notes(os.environ, config.kernel)
    for note in notes if prints else ():
        print_note(note)
    return config


def _train(config: ResolvedConfig, client: Client | None = None, json_output: bool = False) -> int:
    check_torch_folder()
    from nxdt_core.run.training import train as run  # imports torch: only a right configuration pays for it

    summary = run(config, client)
    if client is None or client.place.rank == 0:
        if json_output:
            print_json(summary.to_dict())
        else:
            text = visible(from_here(str(summary)) if sys.stdout.isatty() else str(summary))
            click.echo(re.sub("^[a-z/]+:", lambda name: click.style(name[0], bold=True), text, flags=re.MULTILINE))
    return summary.exit_status


class _Surviving:
    """A stream that drops what is written once its reader has gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write ``text``, or drop it."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            discard_output(self._stream)
            return len(text)

    def flush(self) -> None:
        """Flush, or drop what is left."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            discard_output(self._stream)


@verb(
    "nxdt compile my_run.yaml model.compile=true",
    "nxdt compile recipe:llama-tiny model.compile=true compiler_cache_url=/shared/graphs",
    "nxdt compile recipe:llama3-8b parallel_engine.name=nxd",
    name="compile",
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
    place = find_place()
    if place.world_size > 1:
        from nxdt_core.launch.rank import as_rank

        def run(client: Client) -> int:
            config = _load(source, overrides, prints=client.is_first, trial=True)
            client.watch(config.run.distributed_strategy.timeout_s)
            return _trial(config, speaks=client.place.rank == 0)

        ctx.exit(as_rank(place, run))
    config = _load(source, overrides, trial=True)
    from nxdt_core.train.compile_ahead import ahead_of  # imports torch: only a right configuration pays for it

    ahead = ahead_of(config)
    if ahead.tool:
        command = [*ahead.tool, sys.executable, "-m", "nxdt_core", "compile", "--", config.source, *config.overrides]
        say(f"cache of compiled graphs: {ahead.cache}")
        sys.stdout.flush()
        status = subprocess.run(command, env=os.environ, check=False).returncode
        if status == 0 and ahead.result is not None:
            say(ahead.result())
        ctx.exit(status if status >= 0 else 128 - status)
    if place.launcher or config.run.trainer.devices * config.run.trainer.num_nodes == 1:
        ctx.exit(_trial(config))
    check_layout(config)
    from nxdt_core.launch.launcher import launch

    status, failure = launch(config, ["compile"])
    if failure:
        say(failure, err=True)
    ctx.exit(status)


def _trial(config: ResolvedConfig, *, speaks: bool = True) -> int:
    from nxdt_core.train.compile_ahead import ahead_of, run_trial

    ahead = ahead_of(config)
    if speaks:
        say(f"cache of compiled graphs: {ahead.cache}")
    began = time.monotonic()
    graphs = run_trial(config, ahead, say)
    if speaks and graphs is not None:
        say(f"graphs: {graphs}, in {time.monotonic() - began:.1f} s")
    return 0
