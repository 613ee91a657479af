"""What a checkpoint in the background costs: how long training waits, how much slower the next steps are."""

from __future__ import annotations

import json
from dataclasses import replace

from accelerator.bench import Bench
from accelerator.runs import SHAPES, random_tokens, run_file, train_figures

__all__ = ["background_save"]

_COLUMNS = ("step", "blocked_s", "seconds", "bytes", "gb_per_s", "slowdown")


def background_save(bench: Bench) -> None:
    """Four layers of the 1B model, 4.5 GB of weights and optimizer state, staged in pinned memory where there is any.

    A save that is due while one is being written is left out. The first save also allocates the memory of the copy.
    """
    shape = SHAPES["1b"].sized(bench)
    if not bench.small:
        shape = replace(shape, layers=4, vocabulary=32000)
    sequence, every, rest = (128, 4, 4) if bench.small else (4096, 80, 10)
    steps = every * 4 + rest
    with bench.part("training with saves"):
        path = run_file(
            bench,
            "saves",
            steps=steps,
            every=every // 2,
            model=shape.model(bench, sequence),
            data=random_tokens(bench, shape, sequence, 64 * shape.micro_batch),
            precision=shape.precision,
            checkpoint={
                "enabled": True,
                "every_n_train_steps": every,
                "save_last": False,
                "save_top_k": 1,
                "when_busy": "skip",
            },
        )
        train_figures(bench, "training with saves", path)
        (rows,) = bench.work.glob("runs/**/saves.jsonl")
        for line in rows.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            bench.row(f"save at step {row['step']}", **{name: row[name] for name in _COLUMNS[1:]})
