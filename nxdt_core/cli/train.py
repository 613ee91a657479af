"""``nxdt train``: one run, from a YAML file or a recipe."""

from __future__ import annotations

import click

from nxdt_core.cli.verb import Verb, config_arguments

__all__ = ["train"]


@click.command(
    cls=Verb,
    short_help="Train a model from a YAML file or a recipe.",
    examples=(
        "nxdt train recipe:llama-tiny",
        "nxdt train my_run.yaml",
        "nxdt train my_run.yaml trainer.max_steps=1000 model.optim.lr=3e-4",
    ),
)
@config_arguments
@click.pass_context
def train(ctx: click.Context, source: str, overrides: tuple[str, ...]) -> None:
    """Train a model.

    CONFIG is a YAML file or recipe:NAME. KEY=VALUE replaces or adds one value of it, with the key written
    as a dotted path. Everything is checked before anything is built.

    The same command goes on from the newest checkpoint where exp_manager.resume_if_exists is true. Ctrl-C
    and SIGTERM save a checkpoint at the next step and stop; a second Ctrl-C stops at once.
    """
    from nxdt_core.config import load

    config = load(source, overrides)
    for note in config.notes:
        click.echo(f"note: {note}", err=True)

    from nxdt_core.training.run import train as run  # imports torch: only a configuration that is right pays for it

    summary = run(config)
    click.echo(str(summary))
    ctx.exit(summary.exit_status)
