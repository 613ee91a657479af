"""A picture of runs, from the metric files in their directories. Needs matplotlib, and no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxdt_core.errors.training import NothingToPlot
from nxdt_core.regular_files import regular_opener, replacing

__all__ = ["PlottedRun", "draw", "read_run"]

Row = dict[str, Any]
_FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedRun:
    """What the files of a run say; each step once."""

    name: str
    training: list[Row]
    validation: list[Row]
    resumes: list[int]
    """Steps from which it resumed."""


def read_run(run_dir: Path) -> PlottedRun:
    """Read the metric files of a run.

    Raises:
        NothingToPlot: there are none.
    """
    training = _rows(run_dir, "metrics.jsonl")
    if not training:
        raise NothingToPlot(run=str(run_dir), reason="it has no metrics.jsonl with rows")
    return PlottedRun(
        name=run_dir.resolve().name,
        training=training,
        validation=_rows(run_dir, "validation.jsonl"),
        resumes=[row["step"] for row in _rows(run_dir, "resumes.jsonl")],
    )


def draw(runs: Sequence[PlottedRun], target: Path) -> None:
    """Draw the runs and write ``target``, in the format of its suffix.

    Raises:
        NothingToPlot: matplotlib is missing, or the file cannot be written.
    """
    if target.suffix not in _FORMATS:
        raise NothingToPlot(
            run=str(target), reason=f"its format is none of {', '.join(_FORMATS)}", advice="Name another."
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        advice = "Run: pip install 'nxdt-core[plot]'"
        raise NothingToPlot(
            run=runs[0].name, reason=f"matplotlib cannot be imported: {error}", advice=advice
        ) from error
    figure = Figure(figsize=(8, 6), layout="constrained")
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for number, run in enumerate(runs):
        _draw_run(loss, rate, run, f"{run.name}: " if len(runs) > 1 else "", "--" if number else "-")
    loss.set(ylabel="loss, nats per token", title=runs[0].name if len(runs) == 1 else "")
    rate.set(xlabel="optimizer step", ylabel="learning rate")
    for axes in (loss, rate):
        axes.grid(alpha=0.3)
    loss.legend()
    per_step = runs[0].training[-1]["consumed_tokens"] / runs[0].training[-1]["step"]
    if per_step > 0:
        above = loss.secondary_xaxis("top", functions=(lambda step: step * per_step, lambda tokens: tokens / per_step))
        above.set_xlabel("tokens" if len(runs) == 1 else f"tokens of {runs[0].name}")
    try:
        with replacing(target) as file:
            figure.savefig(file, format=target.suffix.removeprefix("."), dpi=120)
    except OSError as error:
        reason = f"{target} cannot be written: {error.strerror}"
        raise NothingToPlot(run=runs[0].name, reason=reason, advice="Name another file with --output.") from error


def _draw_run(loss: Any, rate: Any, run: PlottedRun, label: str, line: str) -> None:
    (drawn,) = loss.plot(*_points(run.training, "loss"), line, label=f"{label}training", linewidth=1)
    if run.validation:
        loss.plot(*_points(run.validation, "loss"), f"o{line}", label=f"{label}validation", markersize=4)
    for number, step in enumerate(run.resumes):
        mark = {} if number else {"label": f"{label}resumed"}
        loss.axvline(step, color=drawn.get_color(), linestyle=":", linewidth=1, **mark)
    rate.plot(*_points(run.training, "lr"), line, color=drawn.get_color(), linewidth=1)


def _points(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """Steps and values; a value that was not finite is a gap."""
    return [row["step"] for row in rows], [math.nan if row.get(key) is None else row[key] for row in rows]


def _rows(run_dir: Path, name: str) -> list[Row]:
    """Rows by step; after a resume, the last row of a step counts. A row that a crash cut short is left out."""
    try:
        with open(run_dir / name, encoding="utf-8", errors="replace", opener=regular_opener) as file:
            lines = file.readlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise NothingToPlot(run=str(run_dir), reason=f"{name} cannot be read: {error.strerror or error}") from error
    by_step: dict[int, Row] = {}
    for line in lines:
        try:
            row = json.loads(line)
            by_step[int(row["step"])] = row
        except (ValueError, KeyError, TypeError):
            continue
    return [by_step[step] for step in sorted(by_step)]
