"""What ``nxdt compile`` saves: the first step of ``nxdt train`` with an empty cache of graphs and with a filled one.

Whole processes in turn: a run with an empty cache, `nxdt compile` into another empty one, and a run with that. Prints
the seconds of each command, and the seconds that the first step spent in torch.compile.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = ("recipe:llama-tiny", "trainer.accelerator=cpu", "trainer.max_steps=2", "model.compile=true")
COMPILED = re.compile(r"step 1: compiling took ([\d.]+) s \(graphs: (\d+) new, (\d+) from the cache")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    rows: dict[str, list[float]] = {}
    for number in range(parser.parse_args().pairs):
        with tempfile.TemporaryDirectory() as folder:
            for name, verb, cache in (
                ("empty cache", "train", "empty"),
                ("nxdt compile", "compile", "filled"),
                ("filled cache", "train", "filled"),
            ):
                wall, step = measure(
                    verb, Path(folder), cache, f"exp_manager.exp_dir={folder}/{name.partition(' ')[0]}"
                )
                rows.setdefault(f"{name}: command", []).append(wall)
                if step is not None:
                    rows.setdefault(f"{name}: compiling in step 1", []).append(step)
                print(f"{number}: {name}: {wall:.1f} s, compiling in step 1: {step}", flush=True)
    for name, seconds in rows.items():
        print(f"{name}: median {statistics.median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})")


def measure(verb: str, folder: Path, cache: str, *more: str) -> tuple[float, float | None]:
    """Return the seconds of a command, and those that its first step spent compiling."""
    words = [sys.executable, "-m", "nxdt_core", verb, *RUN, f"compiler_cache_url={folder / cache}", *more]
    began = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    match = COMPILED.search(done.stderr + done.stdout)
    return time.perf_counter() - began, None if match is None else float(match.group(1))


if __name__ == "__main__":
    main()
