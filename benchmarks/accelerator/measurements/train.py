"""Pre-training by ``nxdt train``: tokens per second, MFU in both conventions, memory, kernels, the time to start."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from accelerator.bench import Bench
from accelerator.runs import SHAPES, WATCH, length, measure, random_tokens, run_file

__all__ = ["command", "pretrain"]


def pretrain(
    bench: Bench, shape: str, precisions: Sequence[Mapping[str, str]] = ({},), layers: int | None = None
) -> None:
    """One shape at 4,096 tokens, compiled, in its own precision or in each of several.

    Args:
        bench: gets the rows.
        shape: name of the shape.
        precisions: sections ``precision``; an empty one is that of the shape.
        layers: of the model, where they are fewer than the shape's.
    """
    whole = SHAPES[shape]
    for precision in precisions:
        what = " ".join(["nxdt", shape, *([f"{layers} layers"] if layers else []), *precision.values()])
        measure(bench, what, replace(whole, layers=layers or whole.layers, precision=precision or whole.precision))


def command(bench: Bench, shape: str) -> None:
    """The command ``nxdt train`` for one step of a shape: seconds to the end of that step, and of the process."""
    sized, sequence = SHAPES[shape].sized(bench), length(bench)
    with bench.part(f"command {shape}"):
        data = random_tokens(bench, sized, sequence, sized.micro_batch)
        begun = time.monotonic()
        path = run_file(
            bench,
            "command",
            steps=1,
            every=1,
            trainer={"callbacks": [{"name": "watch", "begun": begun}]},
            plugins=WATCH,
            model=sized.model(bench, sequence),
            data=data,
            precision=sized.precision,
        )
        arguments = [sys.executable, "-m", "nxdt_core", "train", str(path)]
        done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        seconds = time.monotonic() - begun
        print(done.stdout)
        done.check_returncode()
        said = next((line for line in done.stdout.splitlines() if line.startswith("First step")), None)
        found = bench.work / "runs" / "command" / "watched.json"
        first_step_s = json.loads(found.read_text(encoding="utf-8"))["first_step_s"]
        bench.row(f"command {shape}", first_step_s=first_step_s, command_s=seconds, parts=said)
