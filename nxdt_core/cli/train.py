"""``nxdt train``: one run, from a YAML file or a recipe."""

from __future__ import annotations

import io
import os
import re
import sys
from typing import TYPE_CHECKING

import click

from nxdt_core.cli.verb import Verb, as_json, config_arguments, print_json, print_note, say
from nxdt_core.engine.compile_cache import check_torch_folder
from nxdt_core.errors import NxdtError
from nxdt_core.system.progress import PROGRESS, process_age_s
from nxdt_core.system.visible_text import from_here, visible

if TYPE_CHECKING:
    from nxdt_core.config import ResolvedConfig
    from nxdt_core.launch.supervision.client import Client


@click.command(
    cls=Verb,
    examples=(
        "nxdt train recipe:llama-tiny",
        "nxdt train my_run.yaml",
        "nxdt train my_run.yaml trainer.max_steps=1000 model.optim.lr=3e-4",
        "nxdt train my_run.yaml trainer.devices=4 distributed_strategy.tensor_model_parallel_size=2",
    ),
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
    from nxdt_core.launch.joining import find_place

    PROGRESS.begin_start(process_age_s())
    PROGRESS.spent("import")
    survive_closed_output()
    place = find_place()
    if place.world_size > 1:
        from nxdt_core.launch.rank import as_rank

        ctx.exit(as_rank(place, lambda client: _train(_load(source, overrides, client.is_first), client, json_output)))
    options = ["--json"] if json_output else []
    config = _load(source, overrides, prints=not max_restarts)
    if max_restarts:
        from nxdt_core.launch.restarts import run_with_restarts

        ctx.exit(run_with_restarts(config, max_restarts, ["train", *options]))
    if place.launcher or config.run.trainer.devices * config.run.trainer.num_nodes == 1:
        ctx.exit(_train(config, json_output=json_output))
    from nxdt_core.cli.checks import check_layout

    check_layout(config)
    from nxdt_core.launch.launcher import launch
    from nxdt_core.run.metric_files import mark_failed

    try:
        outcome = launch(config, ["train", *options])
    except NxdtError as error:
        mark_failed(config, str(error))
        raise
    if outcome.text:
        mark_failed(config, outcome.text, interrupted=outcome.status > 128)
        say(outcome.text, err=True)
    ctx.exit(outcome.status)


def _load(source: str, overrides: tuple[str, ...], prints: bool = True) -> ResolvedConfig:
    from nxdt_core.cli.checks import require_set, vocabulary_notes
    from nxdt_core.config import load
    from nxdt_core.config.migration import environment_notes

    config = load(source, overrides)
    require_set(config)
    if prints:
        engine = config.selected("engine").component.record
        # The variables of NxD Training's job scripts are those of its runtime, which such an engine reads.
        others = () if "xla" in engine.capabilities else environment_notes(os.environ, config.kernel)
        for note in (*config.notes, *vocabulary_notes(config), *others):
            print_note(note)
    PROGRESS.spent("configuration")
    return config


def _train(config: ResolvedConfig, client: Client | None = None, json_output: bool = False) -> int:
    check_torch_folder()
    from nxdt_core.run.training import (
        train as run,  # imports torch: only a configuration that is right pays for it
    )

    summary = run(config, client)
    if client is None or client.place.rank == 0:
        if json_output:
            print_json(summary.to_dict())
        else:
            text = visible(from_here(str(summary)) if sys.stdout.isatty() else str(summary))
            click.echo(re.sub("^[a-z/]+:", lambda name: click.style(name[0], bold=True), text, flags=re.MULTILINE))
    return summary.exit_status


def survive_closed_output() -> None:
    """Let standard output and standard error of this process drop what is written once their reader has gone.

    The log files of a run keep all of it.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            stream.flush()
            setattr(sys, name, _Surviving(stream))


class _Surviving(io.TextIOWrapper):
    def __init__(self, stream: io.TextIOWrapper) -> None:
        """``stream``: whose buffer this writes to."""
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self._stream = stream  # which would close the buffer with its last reference

    def write(self, text: str, /) -> int:
        """Write ``text``, or drop it."""
        try:
            return super().write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """Flush, or drop what is left."""
        try:
            super().flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
