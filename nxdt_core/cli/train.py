"""``nxdt train``: one run, from a YAML file or a recipe."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from nxdt_core.cli.terminal.closed_output import survive_closed_output
from nxdt_core.cli.verb import Verb, as_json, config_arguments, print_json, print_note, say
from nxdt_core.engines.compile_cache import check_torch_folder
from nxdt_core.errors import NxdtError

if TYPE_CHECKING:
    from nxdt_core.config import ResolvedConfig
    from nxdt_core.launch.client import Client

__all__ = ["train"]


@click.command(
    cls=Verb,
    short_help="Train a model from a YAML file or a recipe.",
    examples=(
        "nxdt train recipe:llama-tiny",
        "nxdt train my_run.yaml",
        "nxdt train my_run.yaml trainer.max_steps=1000 model.optim.lr=3e-4",
        "nxdt train my_run.yaml trainer.devices=4 distributed_strategy.tensor_model_parallel_size=2",
    ),
)
@config_arguments
@as_json
@click.pass_context
def train(ctx: click.Context, source: str, overrides: tuple[str, ...], json_output: bool) -> None:
    """Train a model.

    CONFIG is a YAML file or recipe:NAME. KEY=VALUE replaces or adds one value of it, with the key written
    as a dotted path. Everything is checked before anything is built.

    The same command resumes from the newest checkpoint where exp_manager.resume_if_exists is true. Ctrl-C
    and SIGTERM save a checkpoint at the next step and stop; a second Ctrl-C stops at once. A reader of its
    output that goes away does not stop it. With --json, the summary at the end is JSON on standard output; everything
    else is on standard error.

    With trainer.devices above 1 it starts one process per device. With trainer.num_nodes above 1 run it on each
    node with NODE_RANK, MASTER_ADDR and MASTER_PORT set. Under torchrun, Slurm's srun, or another launcher that sets
    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, it joins the processes that are started.
    """
    from nxdt_core.distributed.environment import place_from_environment

    survive_closed_output()
    place = place_from_environment()
    if place.world_size > 1:
        from nxdt_core.launch.rank import as_rank

        ctx.exit(as_rank(place, lambda client: _train(_load(source, overrides, client.is_first), client, json_output)))
    config = _load(source, overrides)
    if place.launcher or config.run.trainer.devices * config.run.trainer.num_nodes == 1:
        ctx.exit(_train(config, json_output=json_output))
    from nxdt_core.cli.config.layout_check import check_layout

    check_layout(config)
    from nxdt_core.launch.launcher import launch
    from nxdt_core.training.monitoring.died import mark_failed

    try:
        outcome = launch(config, ["train", *(["--json"] if json_output else [])])
    except NxdtError as error:
        mark_failed(config, str(error))
        raise
    if outcome.text:
        mark_failed(config, outcome.text)
        say(outcome.text, err=True)
    ctx.exit(outcome.status)


def _load(source: str, overrides: tuple[str, ...], prints: bool = True) -> ResolvedConfig:
    from nxdt_core.cli.config.vocabulary_check import vocabulary_notes
    from nxdt_core.config import load
    from nxdt_core.config.migration import environment_notes
    from nxdt_core.config.placeholders import require_set

    config = load(source, overrides)
    require_set(config)
    if prints:
        engine = config.selected("parallel_engine").component.record
        # The variables of NxD Training's job scripts are those of its runtime, which such an engine reads.
        others = () if "xla" in engine.capabilities else environment_notes(os.environ, config.kernel)
        for note in (*config.notes, *vocabulary_notes(config), *others):
            print_note(note)
    return config


def _train(config: ResolvedConfig, client: Client | None = None, json_output: bool = False) -> int:
    check_torch_folder()
    from nxdt_core.training.run.train import (
        train as run,  # imports torch: only a configuration that is right pays for it
    )

    summary = run(config, client)
    if client is None or client.place.rank == 0:
        if json_output:
            print_json(summary.to_dict())
        else:
            say(str(summary))
    return summary.exit_status
