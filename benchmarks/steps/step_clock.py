"""A local plugin that notes the CPU clock after each optimizer step; used by the benchmarks in this folder."""

from __future__ import annotations

import time

from nxdt_core.api import hookimpl

ticks: list[float] = []
"""``time.process_time()`` after each step of the newest run."""


@hookimpl
def nxdt_fit_start(context: object) -> None:
    ticks.clear()


@hookimpl
def nxdt_step_end(context: object) -> None:
    ticks.append(time.process_time())
