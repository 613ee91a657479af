"""Pre-training by ``nxdt train``: tokens per second, MFU in both conventions, peak memory."""

from __future__ import annotations

from dataclasses import replace

from accelerator.bench import Bench
from accelerator.runs import SHAPES, random_tokens, run_file, train_figures

__all__ = ["pretrain"]

_EVERY, _INTERVALS = 4, 4
"""Steps of an interval, and intervals with the first, which is warm-up."""


def pretrain(bench: Bench, shape: str, precision: str | None = None) -> None:
    """One shape at 4,096 tokens, compiled; in its own precision where none is named."""
    sequence, every = (128, 1) if bench.small else (4096, _EVERY)
    sized = SHAPES[shape].sized(bench)
    if precision is not None:
        sized = replace(sized, precision={"type": precision})
    steps = every * _INTERVALS
    with bench.part(f"nxdt {shape}"):
        path = run_file(
            bench,
            shape,
            steps=steps,
            every=every,
            model=sized.model(bench, sequence),
            data=random_tokens(bench, sized, sequence, steps * sized.micro_batch),
            precision=sized.precision,
        )
        train_figures(bench, f"nxdt {shape}", path, precision=sized.precision["type"])
