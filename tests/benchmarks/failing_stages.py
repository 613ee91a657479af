"""Stages for tests of the driver; child processes import this module."""

import os
import sys
import time
from pathlib import Path


def good(bench, value=1):
    bench.row("good", value=value, small=bench.small)


def partly(bench):
    with bench.part("first"):
        raise ValueError("first part broke")
    with bench.part("second"):
        bench.row("second", value=2)


def full(bench):
    with bench.part("large"):
        raise RuntimeError("could not build the model") from MemoryError("asked for too much")


def broken(bench):
    bench.row("before", value=1)
    print("\n".join(f"line {number}" for number in range(40)))
    sys.exit("the last words")


def watches_imports(bench, rest_s=1):
    """Lasts until another process has made the imports of its stage."""
    for _ in range(600):
        if Path(os.environ["EARLY_IMPORTS"]).exists():
            time.sleep(rest_s)  # in which that process could begin, if it did not wait
            bench.row("times", ended=time.monotonic())
            return
        time.sleep(0.1)
    raise TimeoutError("nobody made imports")


def after_imports(bench):
    bench.row("times", begun=time.monotonic(), imports_s=bench.imports_s)


def endless(bench, seconds=600):
    bench.row("before", value=1)
    print("still at it", flush=True)
    time.sleep(seconds)
