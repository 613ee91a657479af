"""Plot the loss of a run: ``python scripts/plot_loss.py RUN_DIR`` writes ``RUN_DIR/loss.png`` and prints a summary.

Further run directories are drawn into the same plot.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def rows(path: Path) -> list[dict[str, float]]:
    """Rows of a JSON-lines file by step; after a resume the last row of a step counts."""
    if not path.exists():
        return []
    by_step = {row["step"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    return [by_step[step] for step in sorted(by_step)]


def main(runs: list[Path]) -> None:
    """Write one plot of all runs into the first."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for number, run in enumerate(runs):
        label = f"{run.name}: " if len(runs) > 1 else ""
        draw(axes, run, label, linestyle="--" if number else "-")  # a curve that lies on another stays visible
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token", title=runs[0].name if len(runs) == 1 else None)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(runs[0] / "loss.png", dpi=120)
    print(f"plot: {runs[0] / 'loss.png'}")


def draw(axes: plt.Axes, run: Path, label: str, linestyle: str) -> None:
    """Draw a run's curves and print a summary."""
    train, validation = rows(run / "metrics.jsonl"), rows(run / "validation.jsonl")
    if not train:
        sys.exit(f"{run}/metrics.jsonl has no rows: train first")
    steps, losses = [row["step"] for row in train], [row["loss"] for row in train]
    axes.plot(steps, losses, linestyle, label=f"{label}training", linewidth=1)
    if validation:
        steps, losses = [row["step"] for row in validation], [row["loss"] for row in validation]
        axes.plot(steps, losses, f"o{linestyle}", label=f"{label}validation")
    first, last = train[0], train[-1]
    print(f"{label}loss {first['loss']:.3f} at step {first['step']} -> {last['loss']:.3f} at step {last['step']}")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
