"""Stages for tests of the driver; child processes import this module."""

import os
import sys
import time


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


def parent(bench):
    bench.row("parent", parent=os.getppid())


def endless(bench):
    bench.row("before", value=1)
    print("still at it", flush=True)
    time.sleep(600)
