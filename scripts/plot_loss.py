"""Plot the loss of a run: ``python scripts/plot_loss.py RUN_DIR`` writes ``RUN_DIR/loss.png`` and prints a summary."""

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


def main(run: Path) -> None:
    """Write the plot."""
    train, validation = rows(run / "metrics.jsonl"), rows(run / "validation.jsonl")
    if not train:
        sys.exit(f"{run}/metrics.jsonl has no rows: train first")
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot([row["step"] for row in train], [row["loss"] for row in train], label="training", linewidth=1)
    if validation:
        axes.plot([row["step"] for row in validation], [row["loss"] for row in validation], "o-", label="validation")
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token", title=run.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(run / "loss.png", dpi=120)
    first, last = train[0], train[-1]
    print(f"loss {first['loss']:.3f} at step {first['step']} -> {last['loss']:.3f} at step {last['step']}")
    print(f"plot: {run / 'loss.png'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
