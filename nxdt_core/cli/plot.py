"""``nxdt plot``: the loss of runs, from the files in their directories. Needs matplotlib, and no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from nxdt_core.cli.verb import say, verb
from nxdt_core.errors.training import NothingToPlot
from nxdt_core.run.metric_rows import Row, finite, fits_axes, lines_of, rows_by_step
from nxdt_core.system.regular_files import replacing
from nxdt_core.system.visible_text import visible

_FORMATS = (".png", ".svg", ".pdf")


@verb(
    "nxdt plot nxdt_experiments/llama-tiny",
    "nxdt plot nxdt_experiments/llama-tiny nxdt_experiments/llama-small -o both.svg",
)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write: .png, .svg or .pdf. Default: METRIC.png in the first RUN.",
)
@click.option(
    "--metric", metavar="METRIC", default="loss", help="Column of metrics.jsonl, such as reward. Default: loss."
)
def plot(runs: tuple[Path, ...], output: Path | None, metric: str) -> None:
    """Plot the loss of runs into one picture, and print their first and last loss. RUN is the directory of a run.

    The picture shows the loss of training and validation, where a run resumed, and the learning rate, over steps and
    tokens.

    pip install 'nxdt-core[plot]' installs matplotlib, which this command needs.
    """

    read = [read_run(run, metric) for run in runs]
    target = runs[0] / f"{metric.replace('/', '-')}.png" if output is None else output
    draw(read, target, metric)
    for run in read:
        first, last = run.training[0], run.training[-1]
        ends = []
        for row in (first, last):
            value = finite(row.get(metric))
            text = "not finite" if value is None else f"{value:.3f}" if abs(value) < 1e6 else f"{value:.3g}"
            ends.append(f"{text} at step {row['step']}")
        say(f"{run.name}: {metric} {' -> '.join(ends)}")
    say(f"plot: {target}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedRun:
    """Rows that the files of a run hold, each step once."""

    name: str
    training: list[Row]
    validation: list[Row]
    resumes: list[int]
    """Steps from which it resumed."""


def read_run(run_dir: Path, metric: str = "loss") -> PlottedRun:
    """Read the metric files of a run.

    Raises:
        NothingToPlot: there are none, or they have no column ``metric``.
    """
    training = _rows(run_dir, "metrics.jsonl")
    if not training:
        raise NothingToPlot(run=str(run_dir), reason="it has no metrics.jsonl with rows")
    if not any(metric in row for row in training):
        reason, columns = f"its metrics.jsonl has no column {metric!r}", ", ".join(training[-1])
        raise NothingToPlot(run=str(run_dir), reason=reason, advice=f"Name one of: {columns}.")
    return PlottedRun(
        name=visible(run_dir.resolve().name),
        training=training,
        validation=_rows(run_dir, "validation.jsonl"),
        resumes=[row["step"] for row in _rows(run_dir, "resumes.jsonl")],
    )


def draw(runs: Sequence[PlottedRun], target: Path, metric: str = "loss") -> None:
    """Draw a metric of the runs and write ``target``, in the format of its suffix.

    Raises:
        NothingToPlot: matplotlib is missing, or the file cannot be written.
    """
    if target.suffix not in _FORMATS:
        raise NothingToPlot(
            run=str(target), reason=f"its format is none of {', '.join(_FORMATS)}", advice="Name another."
        )
    try:
        from matplotlib.figure import Figure
        from matplotlib.text import Text
    except ImportError as error:
        advice = "Run: pip install 'nxdt-core[plot]'"
        raise NothingToPlot(
            run=runs[0].name, reason=f"matplotlib cannot be imported: {error}", advice=advice
        ) from error
    figure = Figure(figsize=(8, 6), layout="constrained")
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for number, run in enumerate(runs):
        label, line = f"{run.name}: " if len(runs) > 1 else "", "--" if number else "-"
        (drawn,) = loss.plot(*_points(run.training, metric), line, label=f"{label}training", linewidth=1)
        if run.validation:
            loss.plot(*_points(run.validation, metric), f"o{line}", label=f"{label}validation", markersize=4)
        for resume, step in enumerate(run.resumes):
            mark: dict[str, Any] = {} if resume else {"label": f"{label}resumed"}
            loss.axvline(step, color=drawn.get_color(), linestyle=":", linewidth=1, **mark)
        rate.plot(*_points(run.training, "lr"), line, color=drawn.get_color(), linewidth=1)
    loss.set(
        ylabel="loss, nats per token" if metric == "loss" else metric, title=runs[0].name if len(runs) == 1 else ""
    )
    rate.set(xlabel="optimizer step", ylabel="learning rate")
    for axes in (loss, rate):
        axes.grid(alpha=0.3)
    loss.legend()
    row = runs[0].training[-1]
    tokens = finite(row.get("consumed_tokens"))
    per_step = tokens / row["step"] if row["step"] and tokens is not None and tokens >= 1 else None
    if per_step is not None:
        above = loss.secondary_xaxis("top", functions=(lambda step: step * per_step, lambda tokens: tokens / per_step))
        above.set_xlabel("tokens" if len(runs) == 1 else f"tokens of {runs[0].name}")
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names of runs may have dollar signs
    try:
        with replacing(target) as file:
            figure.savefig(file, format=target.suffix.removeprefix("."), dpi=120)
    except OSError as error:
        reason = f"{target} cannot be written: {error.strerror}"
        raise NothingToPlot(run=runs[0].name, reason=reason, advice="Name another file with --output.") from error


def _points(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """Steps and values; a value that axes cannot hold, such as one that was not finite, is a gap."""
    values = (finite(row.get(key)) for row in rows)
    drawn = [math.nan if value is None or not fits_axes(value) else value for value in values]
    return [row["step"] for row in rows], drawn


def _rows(run_dir: Path, name: str) -> list[Row]:
    try:
        return rows_by_step(lines_of(run_dir / name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise NothingToPlot(run=str(run_dir), reason=f"{name} cannot be read: {error.strerror or error}") from error
