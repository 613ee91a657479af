"""``nxdt plot``: the loss of runs, from the files in their directories."""

from __future__ import annotations

from pathlib import Path

import click

from nxdt_core.cli.verb import Verb, say
from nxdt_core.train.run.metric_files import Row, finite

__all__ = ["plot"]


@click.command(
    cls=Verb,
    short_help="Plot loss, validation and learning rate of runs.",
    examples=(
        "nxdt plot nxdt_experiments/llama-tiny",
        "nxdt plot nxdt_experiments/llama-tiny nxdt_experiments/llama-small -o both.svg",
    ),
)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write: .png, .svg or .pdf. Default: loss.png in the first RUN.",
)
def plot(runs: tuple[Path, ...], output: Path | None) -> None:
    """Draw the runs whose directories are RUN into one plot, and print their first and last loss.

    It shows the loss of training and of validations, where a run resumed, and the learning rate, over steps and tokens.
    It needs matplotlib: pip install 'nxdt-core[plot]'.
    """
    from nxdt_core.train.run.plot import draw, read_run

    read = [read_run(run) for run in runs]
    target = runs[0] / "loss.png" if output is None else output
    draw(read, target)
    for run in read:
        first, last = run.training[0], run.training[-1]
        say(f"{run.name}: loss {_loss(first)} at step {first['step']} -> {_loss(last)} at step {last['step']}")
    say(f"plot: {target}")


def _loss(row: Row) -> str:
    loss = finite(row.get("loss"))
    if loss is None:
        return "not finite"
    return f"{loss:.3f}" if abs(loss) < 1e6 else f"{loss:.3g}"
